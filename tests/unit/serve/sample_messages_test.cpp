// Requests for samples as JSON: what is read, and what is refused without a crash.
#include "espalier/serve/sample_messages.h"

#include <gtest/gtest.h>

#include <map>
#include <utility>

#include "damage.h"
#include "espalier/base/error.h"
#include "espalier/serve/wire.h"

namespace espalier::serve {
namespace {

// A member of an object that dies at the end of the statement cannot be held.
template <class Object>
concept GivesMembers = requires(Object&& object) {
  std::forward<Object>(object).member("name");
};
static_assert(GivesMembers<const Fields&> && !GivesMembers<Fields>);

BaseModel model() { return {"tiny", "/models/tiny", "identity of tiny", "Qwen3ForCausalLM", 100, 32}; }

const std::string kRequest =
    R"({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 17]}, {"tokens": [40]}]}, "num_samples": 3, "seq_id": 1,
        "sampling_params": {"max_tokens": 8, "seed": -3, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "stop": [4, 99]},
        "prompt_logprobs": true, "prompt_logprobs_last_n": 1, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 1, "prompt_alt_tokens_k": 2,
        "target_prompt_logprobs": {"shape": [2, 2], "data": [1, 99], "sparse_crow_indices": [0, 1, 2], "sparse_col_indices": [0, 1]}})";

SampleCall read(const std::string& body) { return sample_call(Fields::of_body(body), model()); }

TEST(SampleMessages, ARequestIsRead) {
  const SampleCall call = read(kRequest);
  EXPECT_EQ(call.prompt, (std::vector<std::int32_t>{5, 17, 40}));
  EXPECT_EQ(call.samples, 3);
  EXPECT_EQ(call.most_tokens, 8);
  EXPECT_EQ(call.seed, static_cast<std::uint64_t>(-3));
  EXPECT_EQ(call.top_k, 7);
  EXPECT_EQ(call.stop_ids, (std::vector<std::int32_t>{4, 99}));
  EXPECT_TRUE(call.stops_at_end);
  EXPECT_EQ(call.first_prompt_logprob, 2);
  ASSERT_TRUE(call.targets);
  EXPECT_EQ(call.targets->ids, (std::vector<std::int32_t>{1, 99}));
  EXPECT_EQ(call.targets->row_begins, (std::vector<std::int64_t>{0, 1, 2}));
}

TEST(SampleMessages, WhatDoesNotFitIsRefused) {
  const auto refused = [](const std::string& members) {
    try {
      (void)read("{\"prompt\": {\"chunks\": [{\"tokens\": [1, 2]}]}, " + members + "}");
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(refused("\"num_samples\": 1"), "");
  EXPECT_NE(refused("\"num_samples\": 0").find("num_samples"), std::string::npos);
  EXPECT_NE(refused("\"prompt\": null").find("prompt"), std::string::npos);
  EXPECT_NE(refused("\"prompt\": {\"chunks\": [{\"tokens\": [100]}]}").find("[0, 100)"), std::string::npos);
  EXPECT_NE(refused("\"prompt\": {\"chunks\": [{\"type\": \"image\"}]}").find("image"), std::string::npos);
  EXPECT_NE(refused("\"sampling_params\": {\"max_tokens\": 31}").find("at most 30"), std::string::npos);
  EXPECT_NE(refused("\"sampling_params\": {\"stop\": [\"a\", 3]}").find("stop"), std::string::npos);
  EXPECT_NE(refused("\"target_prompt_logprobs\": {\"shape\": [2, 1], \"data\": [1, 2]}").find("[1, K]"),
            std::string::npos);
  EXPECT_NE(refused("\"record_stability_info\": true").find("stable_reinforce"), std::string::npos);
}

// Any damage ends in a call that fits the model, in a refusal, or in an error. Sanitizers watch over the memory.
TEST(SampleMessages, DamagedBodiesEndInAnAnswer) {
  const auto read_any = [](const std::string& bytes) {
    try {
      const SampleCall call = read(bytes);
      EXPECT_LE(std::ssize(call.prompt) + call.most_tokens, model().context);
    } catch (const Error&) {
    } catch (const Refused&) {
    }
  };
  for (std::size_t end = 0; end < kRequest.size(); ++end) read_any(kRequest.substr(0, end));
  Random random(6);
  for (int round = 0; round < 20000; ++round) read_any(damaged(kRequest, random));
}

// The same with values of any type in the place of any member.
TEST(SampleMessages, MembersOfAnyTypeEndInAnAnswer) {
  const Json whole = Json::parse(kRequest), members = whole.flatten();
  const std::vector<Json> values{
      nullptr, true, -1, 1e300, "text", Json::array(), Json::object(), {1, "a"}, 18446744073709551615u};
  for (const auto& [pointer, unused] : members.items())
    for (std::string at = pointer; !at.empty(); at.resize(at.rfind('/')))
      for (const Json& value : values) {
        Json changed = whole;
        changed[Json::json_pointer(at)] = value;
        try {
          (void)sample_call(Fields(changed), model());
        } catch (const Error&) {
        }
      }
}

TEST(SampleMessages, AnAnswerHasWhatWasAskedFor) {
  SampleCall call;
  call.prompt = {1, 2};
  call.prompt_logprobs = true;
  SampleAnswer answer;
  answer.sequences = {{{3, 4}, {-1, -2}, true, {}}, {{5}, {-3}, false, {}}};
  answer.prompt_logprobs = {0, -1};
  answer.cached_tokens = 1;
  const std::string bytes = write_sample(answer, call);
  std::map<int, int> fields;
  for (WireReader reader(bytes_of_text(bytes)); reader.next();) {
    ++fields[reader.field()];
    if (reader.field() == 2) {
      EXPECT_EQ(reader.bytes().size(), 2 * sizeof(float));
    }
  }
  EXPECT_EQ(fields, (std::map<int, int>{{1, 2}, {2, 1}, {4, 1}}));
}

}  // namespace
}  // namespace espalier::serve
