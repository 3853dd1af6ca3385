// The machine of samplers: responses come, go on and go at any time, and each is what it would be alone.
#include "espalier/generate/decoding.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <gtest/gtest.h>

#include "tests/equivalence/fixture.h"
#include "tests/unit/generate/sampling_case.h"

namespace espalier::testing {
namespace {

constexpr std::uint64_t kModelSeed = 17;

DecodingRules rules(std::uint64_t seed, std::int64_t longest) {
  DecodingRules out;
  out.longest = longest;
  out.random = Random(seed);
  return out;
}

class Machine {
 public:
  explicit Machine(const DecodingLimits& limits = {}, const char* family = "qwen3")
      : model_(tiny_model(family, DType::float64, kModelSeed)), arena_(std::int64_t{1} << 28) {
    model_->decoder.reserve_positions(256);
    DecodingLimits all = limits;
    all.kv_bytes = std::int64_t{1} << 28;
    decoding_.emplace(model_->decoder, all, arena_);
  }

  Decoding* operator->() { return &*decoding_; }
  // Until the response has ended: its tokens and log-probs. Others go on, and are removed when they end.
  DecodedResponse end_of(std::int64_t number) {
    for (;;)
      for (const std::int64_t ended : decoding_->step()) {
        if (ended != number) continue;
        DecodedResponse out = decoding_->response(number);
        decoding_->remove(number);
        return out;
      }
  }
  std::vector<std::int32_t> prompt(std::int64_t length, std::uint64_t seed) const {
    return make_prompts({length}, model_->shape.vocabulary, seed).front().ids;
  }

 private:
  const at::AutoDispatchBelowADInplaceOrView unrecorded_;
  std::unique_ptr<ModelState> model_;
  Arena arena_;
  std::optional<Decoding> decoding_;
};

void expect_same(const DecodedResponse& found, const DecodedResponse& wanted) {
  EXPECT_EQ(found.tokens, wanted.tokens);
  EXPECT_EQ(found.logprobs, wanted.logprobs);  // the same bits
}

DecodedResponse alone(std::int64_t length, std::uint64_t seed, std::int64_t longest) {
  Machine machine;
  return machine.end_of(machine->add(machine.prompt(length, seed), {rules(seed, longest)}, ""));
}

TEST(Decoding, ResponsesThatComeAndGoChangeNoOther) {
  Machine machine;
  const std::int64_t first = machine->add(machine.prompt(9, 1), {rules(1, 20)}, "");
  for (int i = 0; i < 4; ++i) machine->step();
  const std::int64_t second = machine->add(machine.prompt(30, 2), {rules(2, 12)}, "");
  const std::int64_t cancelled = machine->add(machine.prompt(9, 1), {rules(3, 20)}, "");
  for (int i = 0; i < 3; ++i) machine->step();
  machine->remove(cancelled);
  const std::int64_t waits = machine->add(machine.prompt(5, 4), {rules(4, 20)}, "");
  machine->remove(waits);  // before its first step
  expect_same(machine.end_of(second), alone(30, 2, 12));
  expect_same(machine.end_of(first), alone(9, 1, 20));
  EXPECT_EQ(machine->running() + machine->waiting() + machine->held(), 0);
  EXPECT_EQ(machine->step(), std::vector<std::int64_t>());
}

TEST(Decoding, ALongPromptIsComputedBetweenTheTokensOfOthers) {
  Machine machine({.token_budget = 16, .prompt_rows = 10});
  const std::int64_t early = machine->add(machine.prompt(9, 1), {rules(1, 30)}, "");
  machine->step();
  ASSERT_EQ(machine->response(early).tokens.size(), 1u);
  const std::int64_t late = machine->add(machine.prompt(75, 2), {rules(2, 5)}, "");
  const std::int64_t other = machine->add(machine.prompt(7, 3), {rules(3, 5)}, "");
  for (std::size_t step = 1; step <= 7; ++step) {  // 70 of its 75 rows
    machine->step();
    EXPECT_EQ(machine->response(early).tokens.size(), 1 + step);
    EXPECT_EQ(machine->counts().prompt_rows, static_cast<std::int64_t>(9 + 10 * step));
    EXPECT_TRUE(machine->response(late).tokens.empty());
  }
  machine->step();
  EXPECT_EQ(machine->response(late).tokens.size(), 1u);
  EXPECT_TRUE(machine->response(other).tokens.empty());  // 5 of its rows are there
  expect_same(machine.end_of(late), alone(75, 2, 5));
  expect_same(machine.end_of(other), alone(7, 3, 5));
  expect_same(machine.end_of(early), alone(9, 1, 30));
}

TEST(Decoding, APromptThatLeavesHalfComputedTakesItsRowsAlong) {
  Machine machine({.prompt_rows = 10});
  machine->remove([&] {
    const std::int64_t gone = machine->add(machine.prompt(40, 1), {rules(1, 5)}, "");
    machine->step();
    return gone;
  }());
  EXPECT_EQ(machine->held(), 0);
  expect_same(machine.end_of(machine->add(machine.prompt(40, 1), {rules(1, 5)}, "")), alone(40, 1, 5));
}

TEST(Decoding, AddFirstComesBeforeThoseThatWait) {
  Machine machine({.most_at_once = 1});
  const std::int64_t first = machine->add(machine.prompt(9, 1), {rules(1, 3)}, "");
  machine->step();
  machine->add(machine.prompt(8, 2), {rules(2, 3)}, "");
  const std::int64_t third = machine->add_first(machine.prompt(7, 3), rules(3, 3), "");
  const std::int64_t fourth = machine->add_first(machine.prompt(7, 3), rules(4, 3), "");
  machine.end_of(first);
  machine->step();
  EXPECT_EQ(machine->response(third).tokens.size(), 1u);
  expect_same(machine.end_of(third), alone(7, 3, 3));
  machine->step();
  EXPECT_EQ(machine->response(fourth).tokens.size(), 1u);
}

TEST(Decoding, ARestartedResponseGoesOnBehindItsNewTokens) {
  for (const std::size_t kept : {0u, 1u, 4u, 5u}) {
    Machine machine;
    DecodingRules own = rules(1, 24);
    own.stop_ids.resize(static_cast<std::size_t>(90));
    for (std::int32_t id = 0; id < 90; ++id) own.stop_ids[static_cast<std::size_t>(id)] = id;
    const std::vector<std::int32_t> prompt = machine.prompt(9, 1);
    const std::int64_t number = machine->add(prompt, {own}, "");
    std::vector<std::int64_t> ended;
    for (int turn = 0; turn < 5; ++turn) {
      while (ended.empty()) ended = machine->step();
      ended.clear();
      if (turn < 4) machine->carry_on(number, {});
    }
    std::vector<std::int32_t> tokens = machine->response(number).tokens;
    tokens.resize(std::min(tokens.size(), kept));
    for (const std::int32_t id : {7, 8, 9}) tokens.push_back(id);
    ASSERT_TRUE(machine->restart(number, tokens));
    EXPECT_EQ(machine->response(number).sampled, std::vector<std::uint8_t>(tokens.size(), 0));
    while (ended.empty()) ended = machine->step();
    const DecodedResponse& found = machine->response(number);
    ASSERT_EQ(found.tokens.size(), tokens.size() + 1);
    // The same token, with the same number drawn, behind a prompt that has all of it.
    Machine other;
    std::vector<std::int32_t> whole = prompt;
    whole.insert(whole.end(), tokens.begin(), tokens.end());
    DecodingRules fresh = rules(1, 1);
    for (int drawn = 0; drawn < 5; ++drawn) fresh.random.uniform();
    const DecodedResponse wanted = other.end_of(other->add(whole, {fresh}, ""));
    EXPECT_EQ(found.tokens.back(), wanted.tokens.front());
    EXPECT_EQ(found.logprobs.back(), wanted.logprobs.front());
  }
}

}  // namespace
}  // namespace espalier::testing
