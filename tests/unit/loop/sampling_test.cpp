// The memory that the loop samples under: the run's models leave room for the keys and values, and for no more.
#include "espalier/loop/sampling.h"

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "espalier/ops/operations.h"
#include "espalier/shape/path_leaves.h"
#include "espalier/state/planning.h"
#include "tests/unit/generate/sampling_case.h"

namespace espalier::testing {
namespace {

// Prompts of 40 tokens; whatever is answered is worth nothing.
class SamePrompts : public Questions {
 public:
  std::vector<Prompt> train(const Draw&, std::int64_t count) override { return prompts(count); }
  std::vector<Prompt> held_out() override { return {}; }
  std::vector<Judgement> judge(std::vector<Rollout>& rollouts, Progress&) override {
    return std::vector<Judgement>(rollouts.size(), {0.0, 0.0});
  }
  std::int64_t longest_prompt() const override { return kTokens; }
  const std::vector<std::int32_t>& stop_ids() const override { return none_; }
  std::string fingerprint() const override { return ""; }

 private:
  static constexpr std::int64_t kTokens = 40;
  static std::vector<Prompt> prompts(std::int64_t count) {
    return make_prompts(std::vector<std::int64_t>(static_cast<std::size_t>(count), kTokens), 50, 3);
  }
  TurnTexts& turn_texts() override { throw std::logic_error("no environment here"); }

  std::vector<std::int32_t> none_;
};

class LoopSampling : public ::testing::Test {
 protected:
  LoopSampling() {
    options_.train_batch_size = 16, options_.n = "8", options_.max_response_length = 20;
    model_->decoder.reserve_positions(60);
  }

  std::int64_t held() const { return bytes_held(std::vector{HeldModel{model_->shape, {}}}, DType::float32); }
  std::int64_t activations() const { return sampling_bytes(model_->shape, DType::float32, kMostDecoded); }

  // Most keys and values that a batch held, beside the actor and `more` bytes of budget.
  std::int64_t kv_bytes(std::int64_t more, Arena& arena) {
    options_.memory_budget = std::to_string(held() + more);
    SamePrompts questions;
    NoProgress progress;
    Sampling sampling(options_, questions, model_->decoder, std::vector{HeldModel{model_->shape, {}}}, arena, progress);
    const SampledBatch batch = sampling.batch(0, 0);
    EXPECT_EQ(batch.rollouts.size(), 128u);
    return batch.generated["kv_bytes"]["held"];
  }

  std::unique_ptr<ModelState> model_ = tiny_model("llama", DType::float32, 1);
  Options options_ = default_options('l');
};

TEST_F(LoopSampling, KeysAndValuesTakeWhatTheModelsLeaveAndNoMore) {
  Arena arena(std::int64_t{1} << 30);
  const std::int64_t all = kv_bytes(std::int64_t{1} << 30, arena), room = all / 3;
  EXPECT_GT(all, 16 * 40 * kv_bytes_per_token(model_->shape, DType::float32));
  const std::int64_t some = kv_bytes(activations() + room, arena);
  EXPECT_LE(some, room);
  EXPECT_GT(some, room / 2);  // a prompt's rows with one response are a fortieth of it
}

TEST_F(LoopSampling, WhatAnUpdateTouchedOfTheArenaGoesBackWhereKeysAndValuesNeedIt) {
  constexpr std::int64_t kUpdate = std::int64_t{64} << 20;
  Arena arena(std::int64_t{1} << 30);
  const auto update = [&] {
    const ArenaScope scope(arena);
    arena.device().operations().zero(arena.take({kUpdate / 4}, at::kFloat));
  };
  update();
  kv_bytes(std::int64_t{1} << 30, arena);
  EXPECT_GE(arena.touched(), kUpdate);
  kv_bytes(activations() + kUpdate / 2, arena);
  EXPECT_LT(arena.touched(), kUpdate / 2);
}

}  // namespace
}  // namespace espalier::testing
