// Responses sampled by several ranks: the tokens of one process, each prompt computed once in the whole world.
#include <gtest/gtest.h>

#include <mutex>

#include "espalier/base/error.h"
#include "espalier/base/random.h"
#include "espalier/generate/sampler.h"
#include "tests/parallel/layouts.h"
#include "tests/with_products.h"

namespace espalier::testing {
namespace {

// Prompts of several lengths; the last one equals the first.
std::vector<Prompt> prompts_of(std::int64_t vocabulary) {
  Random random(3);
  std::vector<Prompt> prompts;
  for (const int length : {5, 1, 12, 7, 3}) {
    Prompt& prompt = prompts.emplace_back();
    for (int i = 0; i < length; ++i) prompt.ids.push_back(static_cast<std::int32_t>(random.integer(0, vocabulary - 1)));
  }
  prompts.push_back(prompts.front());
  return prompts;
}

Generated sampled(const std::string& family, const SamplingSettings& settings, const Mesh& mesh = mesh_of_one(),
                  DType dtype = DType::float64) {
  const auto model = tiny_model(family, dtype, 7, false, mesh);
  const std::vector<Prompt> prompts = prompts_of(model->shape.vocabulary);
  model->decoder.reserve_positions(positions_needed(model->shape, prompts, settings));
  Arena arena(std::int64_t{1} << 30);
  NoProgress progress;
  return generate(model->decoder, prompts, settings, arena, progress);
}

void expect_responses_of_one_process(const std::string& family, const std::vector<Degrees>& layouts) {
  SamplingSettings settings;
  settings.n = 3, settings.max_response_length = 12, settings.seed = 5, settings.top_p = 0.95;
  settings.stop_ids = {4, 9}, settings.max_num_seqs = 4, settings.kv_limit_bytes = 1 << 24;
  settings.kept_sets = true;
  const Generated one = sampled(family, settings);
  for (const Degrees& degrees : layouts) {
    std::mutex lock;
    run_ranks(degrees, [&](const Mesh& mesh) {
      const Generated ranks = sampled(family, settings, mesh);
      const std::lock_guard guard(lock);
      SCOPED_TRACE(text_of(family, ", ", text_of_degrees(degrees), ", rank ", mesh.world.rank()));
      ASSERT_EQ(ranks.rollouts.size(), one.rollouts.size());
      for (std::size_t i = 0; i < one.rollouts.size(); ++i) {
        EXPECT_EQ(ranks.rollouts[i].response_ids, one.rollouts[i].response_ids) << i;
        EXPECT_EQ(ranks.rollouts[i].carried, one.rollouts[i].carried);
        EXPECT_EQ(ranks.rollouts[i].loss_mask, one.rollouts[i].loss_mask);
        EXPECT_EQ(ranks.rollouts[i].kept_sets.begin, one.rollouts[i].kept_sets.begin);
        EXPECT_EQ(ranks.rollouts[i].kept_sets.ids, one.rollouts[i].kept_sets.ids);
        for (const auto series : {&Rollout::rollout_logprobs, &Rollout::full_logprobs}) {
          const std::vector<double>&found = ranks.rollouts[i].*series, &wanted = one.rollouts[i].*series;
          ASSERT_EQ(found.size(), one.rollouts[i].response_ids.size());
          ASSERT_EQ(found.size(), wanted.size());
          for (std::size_t t = 0; t < wanted.size(); ++t) EXPECT_NEAR(found[t], wanted[t], kFloat64);
        }
      }
      EXPECT_EQ(ranks.report.prompt_rows_physical, one.report.prompt_rows_physical) << "each prompt once";
      EXPECT_EQ(ranks.report.response_tokens, one.report.response_tokens);
      EXPECT_EQ(ranks.report.kept_ids, one.report.kept_ids);
    });
  }
}

struct Sampling {
  const char* family;
  Degrees degrees;
};

// tp adds in another order; ranks of dp and experts shared by them do not.
TEST(GenerateOnRanks, GivesTheBitsOfOneProcess) {
  const WithProducts own(true);
  SamplingSettings settings;
  settings.n = 3, settings.max_response_length = 12, settings.seed = 5, settings.max_num_seqs = 4;
  settings.kv_limit_bytes = 1 << 24;
  for (const DType dtype : {DType::float32, DType::bfloat16})
    for (const Sampling& by : {Sampling{"qwen3", {.dp = 2}}, Sampling{"DeepseekV3", {.dp = 3}},
                               Sampling{"qwen3-moe", {.dp = 2, .ep = 2}}, Sampling{"qwen3-moe", {.dp = 4, .ep = 4}}}) {
      const Generated one = sampled(by.family, settings, mesh_of_one(), dtype);
      std::mutex lock;
      run_ranks(by.degrees, [&](const Mesh& mesh) {
        const Generated ranks = sampled(by.family, settings, mesh, dtype);
        const std::lock_guard guard(lock);
        SCOPED_TRACE(
            text_of(by.family, ", ", name_of(dtype), ", ", text_of_degrees(by.degrees), ", rank ", mesh.world.rank()));
        ASSERT_EQ(ranks.rollouts.size(), one.rollouts.size());
        for (std::size_t i = 0; i < one.rollouts.size(); ++i) {
          EXPECT_EQ(ranks.rollouts[i].response_ids, one.rollouts[i].response_ids) << i;
          EXPECT_EQ(ranks.rollouts[i].rollout_logprobs, one.rollouts[i].rollout_logprobs) << i;
        }
      });
    }
}

TEST(GenerateOnRanks, GivesTheResponsesOfOneProcess) {
  for (const char* family : {"qwen3", "llama-bias", "DeepseekV3"})
    expect_responses_of_one_process(family, {{.tp = 2}, {.tp = 4}, {.dp = 2}, {.dp = 7}, {.tp = 2, .dp = 3}});
}

TEST(GenerateOnRanks, WithExpertsToo) {
  expect_responses_of_one_process("qwen3-moe",
                                  {{.tp = 2}, {.tp = 2, .ep = 2}, {.dp = 4, .ep = 4}, {.tp = 2, .dp = 2, .ep = 4}});
}

}  // namespace
}  // namespace espalier::testing
