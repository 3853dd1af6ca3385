// A step takes what it needs from the arena: from the second step of equal shapes on the heap gives no large block, and
// the number of small ones stands still. The heap still gives book-keeping: about a hundred bytes a row, and a
// tensor's header for each buffer of the arena.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include "espalier/data/training_data.h"
#include "espalier/mixers/attention/shape.h"
#include "espalier/step/step.h"
#include "tests/support/make_rollouts.h"
#include "tests/unit/allocations/heap_count.h"

namespace espalier {
namespace {

using testing::HeapCount;

// Every tensor of a layer's rows is far above 64 KiB: 2,048 rows of 128 floats are 1 MiB.
ModelShape shape_of_test() {
  ModelShape shape;
  shape.architecture = "Qwen3ForCausalLM";
  shape.hidden = 128;
  shape.layer = attention_layers(3, {.heads = 4, .kv_heads = 2, .head_dim = 32, .qk_norm = true}, 256);
  shape.vocabulary = 1024, shape.max_positions = 2048;
  shape.tied_head = true;
  return shape;
}

std::vector<Rollout> rollouts_of_test() {
  testing::RolloutOptions options;
  options.groups = 1;
  options.group_size = {4, 4};
  options.prompt_length = {256, 256};
  options.response_length = {256, 256};
  options.vocabulary = 1024;
  return testing::make_rollouts(options, 1);
}

// The blocks that the heap gave in each of four steps.
std::vector<HeapCount> count_steps(const std::string& schedule, DType dtype, const std::string& policy_loss) {
  Options options;
  options.memory_budget = "1GiB";
  options.schedule = schedule;
  options.dtype = name_of(dtype);
  options.policy_loss = policy_loss;
  if (schedule == "phased") options.token_budget = 600;  // two waves below the trunk
  const auto model = random_model(shape_of_test(), dtype, 1);
  const TrainingData data(rollouts_of_test(), options);
  model->decoder.reserve_positions(data.longest());
  AdamW optimizer(model->table, model->weights, AdamWSettings::from(options));
  Actor actor(*model, options, default_profile("cpu", dtype, 2), &optimizer);
  std::vector<HeapCount> counts;
  for (int step = 0; step < 4; ++step) {
    testing::start_counting();
    run_step(actor, data.mini_batch(0), false);
    counts.push_back(testing::stop_counting());
  }
  return counts;
}

void expect_no_growth(const std::vector<HeapCount>& counts) {
  EXPECT_GT(counts[0].calls, 100);  // else nothing was counted
  EXPECT_EQ(counts[3].calls, counts[2].calls);
  EXPECT_EQ(counts[3].bytes, counts[2].bytes);
  EXPECT_EQ(counts[3].large, counts[2].large);
}

class Churn : public ::testing::TestWithParam<std::string> {};

TEST_P(Churn, NoStepAfterTheFirstTakesLargeBlocksFromTheHeap) {
  if (!testing::heap_is_counted()) GTEST_SKIP() << "a sanitizer has the heap";
  for (const DType dtype : {DType::float32, DType::float64})
    for (const char* loss : {"vanilla", "gspo"}) {
      SCOPED_TRACE(std::string(name_of(dtype)) + ", " + loss);
      const std::vector<HeapCount> counts = count_steps(GetParam(), dtype, loss);
      expect_no_growth(counts);
      for (std::size_t step = 1; step < counts.size(); ++step)
        EXPECT_EQ(counts[step].large, std::vector<std::int64_t>()) << "step " << step + 1;
    }
}

// In bfloat16 the matrix library takes its own scratch for every product and gives it back; nothing else may.
TEST_P(Churn, InBfloat16StepsAreAlikeToTheByte) {
  if (!testing::heap_is_counted()) GTEST_SKIP() << "a sanitizer has the heap";
  expect_no_growth(count_steps(GetParam(), DType::bfloat16, "vanilla"));
}

INSTANTIATE_TEST_SUITE_P(Schedules, Churn, ::testing::Values("dense", "packed", "phased"));

TEST(HeapCount, SeesBlocksOfEveryKind) {
  if (!testing::heap_is_counted()) GTEST_SKIP() << "a sanitizer has the heap";
  testing::start_counting();
  const at::Tensor tensor = at::empty({1 << 20}, at::kByte);
  const std::vector<char> vector(70000);
  const HeapCount count = testing::stop_counting();
  ASSERT_EQ(count.large.size(), 2u);
  EXPECT_GE(count.large[0], 1 << 20);
  EXPECT_EQ(count.large[1], 70000);
}

}  // namespace
}  // namespace espalier
