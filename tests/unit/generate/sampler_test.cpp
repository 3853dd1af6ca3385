// Sampling with shared prompts against the plain way, and against itself under every other arrangement of the work.
#include "espalier/generate/sampler.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <cmath>

#include "espalier/base/error.h"
#include "espalier/shape/path_leaves.h"
#include "tests/unit/generate/sampling_case.h"

namespace espalier::testing {
namespace {

constexpr std::uint64_t kSeed = 5;
constexpr std::int64_t kVocabulary = 50;

// One-token prompts, equal prompts, and lengths on both sides of the kernels' blocks of keys.
std::vector<Prompt> mixed_prompts() { return make_prompts({7, 1, 19, 130, 3, 1, 7}, kVocabulary, kSeed); }

SamplingSettings greedy(std::int64_t n, std::int64_t longest) {
  SamplingSettings settings;
  settings.n = n, settings.temperature = 0, settings.max_response_length = longest;
  return settings;
}

SamplingSettings drawn(std::int64_t n, std::int64_t longest) {
  SamplingSettings settings = greedy(n, longest);
  settings.temperature = 0.8, settings.top_k = 30, settings.top_p = 0.95, settings.seed = 3;
  settings.stop_ids = {4, 11};
  return settings;
}

// Tokens equal, log-probs within rounding of float64: sums of some 100 terms of size 1.
void expect_same(const std::vector<Rollout>& found, const std::vector<Rollout>& wanted, const std::string& what) {
  ASSERT_EQ(found.size(), wanted.size()) << what;
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_EQ(found[i].response_ids, wanted[i].response_ids) << what << ", response " << i;
    ASSERT_EQ(found[i].group, wanted[i].group);
    ASSERT_EQ(found[i].carried, wanted[i].carried);
    for (std::size_t t = 0; t < found[i].rollout_logprobs.size(); ++t)
      ASSERT_NEAR(found[i].rollout_logprobs[t], wanted[i].rollout_logprobs[t], 1e-12)
          << what << ", response " << i << ", token " << t;
  }
}

double worst_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) worst = std::max(worst, std::abs(a[i] - b[i]));
  return worst;
}

class EveryFamily : public ::testing::TestWithParam<const char*> {};

TEST_P(EveryFamily, GreedyEqualsScoringTheWholeSequenceForEveryToken) {
  const auto model = tiny_model(GetParam(), DType::float64, kSeed);
  const std::vector<Prompt> prompts = mixed_prompts();
  const Generated sampled = sample(*model, prompts, greedy(2, 40));
  ASSERT_EQ(sampled.rollouts.size(), 2 * prompts.size());
  for (std::size_t p = 0; p < prompts.size(); ++p) {
    std::vector<std::int32_t> ids = prompts[p].ids;
    for (int t = 0; t < 40; ++t) {
      const at::Tensor last = dense_logits_TV(*model, ids)[static_cast<std::int64_t>(ids.size()) - 1];
      ids.push_back(static_cast<std::int32_t>(last.argmax().item<std::int64_t>()));
    }
    const std::vector<std::int32_t> wanted(ids.end() - 40, ids.end());
    for (std::size_t r = 0; r < 2; ++r)
      EXPECT_EQ(sampled.rollouts[2 * p + r].response_ids, wanted) << "prompt " << p << ", response " << r;
  }
}

TEST_P(EveryFamily, LogprobsAreThoseOfTheWholeSequence) {
  const auto model = tiny_model(GetParam(), DType::float64, kSeed);
  SamplingSettings settings = drawn(3, 60);
  settings.top_k = 0, settings.top_p = 1;
  for (const Rollout& rollout : sample(*model, mixed_prompts(), settings).rollouts)
    EXPECT_LT(worst_difference(rollout.rollout_logprobs, dense_logprobs(*model, rollout)), 1e-12);
}

TEST_P(EveryFamily, NeitherPlacesNorSharingNorPiecesOfPromptsChangeAResponse) {
  const auto model = tiny_model(GetParam(), DType::float64, kSeed);
  const std::vector<Prompt> prompts = mixed_prompts();
  const Generated all = sample(*model, prompts, drawn(5, 50));
  for (const std::int64_t places : {1, 2, 7}) {
    SamplingSettings settings = drawn(5, 50);
    settings.max_num_seqs = places;
    settings.token_budget = 3 * places;
    expect_same(sample(*model, prompts, settings).rollouts, all.rollouts, "places " + std::to_string(places));
  }
  SamplingSettings unshared = drawn(5, 50);
  unshared.share_prompts = false;
  expect_same(sample(*model, prompts, unshared).rollouts, all.rollouts, "unshared");
  SamplingSettings little = drawn(5, 50);  // memory for two or three responses at a time
  little.kv_limit_bytes = 300 * kv_bytes_per_token(model->shape, DType::float64);
  const Generated within = sample(*model, prompts, little);
  expect_same(within.rollouts, all.rollouts, "little memory");
  EXPECT_LE(within.report.kv_bytes, little.kv_limit_bytes);
}

INSTANTIATE_TEST_SUITE_P(Families, EveryFamily,
                         ::testing::Values("llama", "llama-bias", "qwen2", "qwen3", "qwen3-moe", "qwen3-moe-sparse",
                                           "qwen3-window", "llama-windows", "qwen3-next", "qwen3-next-last",
                                           "qwen3-next-moe", "Bamba", "GraniteMoeHybrid", "NemotronH", "Lfm2", "Gemma4",
                                           "gemma4-reads", "gemma4-moe"));

// float32 and bfloat16 lose no more than twice what the dense way loses, both against float64 on the same weights.
TEST(Sampler, LowerPrecisionIsWithinTwiceTheErrorOfDense) {
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    const auto model = tiny_model("qwen3", dtype, kSeed);
    const auto exact = in_float64(*model);
    SamplingSettings settings = drawn(8, 100);
    settings.stop_ids.clear();
    double own = 0, dense = 0;
    for (const Rollout& rollout : sample(*model, mixed_prompts(), settings).rollouts) {
      const std::vector<double> truth = dense_logprobs(*exact, rollout);
      own = std::max(own, worst_difference(rollout.rollout_logprobs, truth));
      dense = std::max(dense, worst_difference(dense_logprobs(*model, rollout), truth));
    }
    EXPECT_GT(dense, 0);
    EXPECT_LT(own, 2 * dense) << name_of(dtype);
  }
}

// Keeps what a run shows of itself: `parts` in the order in which they were told.
class Shown final : public Progress {
 public:
  void begin(std::string_view, std::int64_t, std::string_view) override {}
  void advance_to(std::int64_t) override {}
  void end() override {}
  void note(std::string_view) override {}
  void part(std::string_view text) override { parts.emplace_back(text); }
  std::vector<std::string> parts;
};

TEST(Sampler, ProgressSaysHowFarThePromptsAre) {
  const auto model = tiny_model("qwen3", DType::float32, kSeed);
  SamplingSettings settings = greedy(2, 3);
  settings.token_budget = 50;
  Arena arena(std::int64_t{1} << 30);
  Shown shown;
  const std::vector<Prompt> prompts = make_prompts({70, 30}, kVocabulary, kSeed);
  model->decoder.reserve_positions(positions_needed(model->shape, prompts, settings));
  generate(model->decoder, prompts, settings, arena, shown);
  EXPECT_EQ(shown.parts,
            (std::vector<std::string>{"prompts: 50 of 100 tokens computed", "prompts: 100 of 100 tokens computed"}));
}

TEST(Sampler, TopKOfOneIsGreedy) {
  const auto model = tiny_model("qwen3", DType::float64, kSeed);
  SamplingSettings one = drawn(2, 40);
  one.top_k = 1, one.top_p = 1, one.stop_ids.clear();
  const auto found = sample(*model, mixed_prompts(), one).rollouts;
  const auto wanted = sample(*model, mixed_prompts(), greedy(2, 40)).rollouts;
  for (std::size_t i = 0; i < found.size(); ++i) EXPECT_EQ(found[i].response_ids, wanted[i].response_ids);
}

TEST(Sampler, GreedyLogprobsAreThoseOfTemperatureOne) {
  const auto model = tiny_model("llama", DType::float64, kSeed);
  for (const Rollout& rollout : sample(*model, mixed_prompts(), greedy(1, 20)).rollouts) {
    EXPECT_EQ(rollout.temperature, 1);
    EXPECT_LT(worst_difference(rollout.rollout_logprobs, dense_logprobs(*model, rollout)), 1e-12);
  }
}

TEST(Sampler, AResponseEndsWithItsFirstStopTokenOrAtItsLength) {
  const auto model = tiny_model("qwen2", DType::float64, kSeed);
  const SamplingSettings settings = drawn(20, 30);
  int stopped = 0, full = 0;
  for (const Rollout& rollout : sample(*model, mixed_prompts(), settings).rollouts) {
    const auto& ids = rollout.response_ids;
    const auto is_stop = [&](std::int32_t id) { return id == 4 || id == 11; };
    EXPECT_TRUE(std::none_of(ids.begin(), ids.end() - 1, is_stop));
    EXPECT_EQ(rollout.loss_mask, std::vector<std::uint8_t>(ids.size(), 1));
    EXPECT_EQ(rollout.rollout_logprobs.size(), ids.size());
    if (is_stop(ids.back())) {
      ++stopped;
      EXPECT_EQ(rollout.carried, R"({"finish_reason":"stop"})");
    } else {
      ++full;
      EXPECT_EQ(ids.size(), 30u);
      EXPECT_EQ(rollout.carried, R"({"finish_reason":"length"})");
    }
  }
  EXPECT_GT(stopped, 5);
  EXPECT_GT(full, 5);
}

TEST(Sampler, ResponsesOfOneToken) {
  const auto model = tiny_model("qwen3", DType::float64, kSeed);
  const std::vector<Prompt> prompts = mixed_prompts();
  const auto longer = sample(*model, prompts, drawn(3, 10)).rollouts;
  const auto found = sample(*model, prompts, drawn(3, 1)).rollouts;
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_EQ(found[i].response_ids.size(), 1u);
    EXPECT_EQ(found[i].response_ids.front(), longer[i].response_ids.front());
  }
}

TEST(Sampler, AResponseEndsWhereTheModelsPositionsEnd) {
  const auto model = tiny_model("qwen3", DType::float64, kSeed);  // 256 positions
  const auto found = sample(*model, make_prompts({250, 3}, kVocabulary, kSeed), greedy(1, 1000000)).rollouts;
  EXPECT_EQ(found[0].length(), 256);
  EXPECT_EQ(found[1].length(), 256);
}

TEST(Sampler, SeedsAndOrdinalsGiveDifferentResponses) {
  const auto model = tiny_model("qwen3", DType::float64, kSeed);
  SamplingSettings settings = drawn(2, 40);
  settings.temperature = 1.5, settings.top_k = 0, settings.top_p = 1, settings.stop_ids.clear();
  const std::vector<Prompt> prompts = mixed_prompts();  // the first and the last are equal
  const auto first = sample(*model, prompts, settings).rollouts;
  settings.seed = 4;
  const auto second = sample(*model, prompts, settings).rollouts;
  EXPECT_NE(first[0].response_ids, first[1].response_ids);
  EXPECT_NE(first[0].response_ids, first[first.size() - 2].response_ids);
  for (std::size_t i = 0; i < first.size(); ++i) EXPECT_NE(first[i].response_ids, second[i].response_ids);
}

TEST(Sampler, EveryPromptRowIsComputedAndHeldOnce) {
  const auto model = tiny_model("qwen3", DType::float64, kSeed);
  const std::vector<Prompt> prompts = mixed_prompts();
  const SamplingSettings settings = greedy(8, 17);
  const GenerateReport shared = sample(*model, prompts, settings).report;
  constexpr std::int64_t kDistinct = 7 + 1 + 19 + 130 + 3 + 1, kAll = kDistinct + 7;  // the two of one token may differ
  EXPECT_EQ(shared.prompts, 7);
  EXPECT_EQ(shared.responses, 56);
  EXPECT_EQ(shared.prompt_rows_logical, 8 * kAll);
  EXPECT_EQ(shared.prompt_rows_physical, prompts[1].ids == prompts[5].ids ? kDistinct - 1 : kDistinct);
  EXPECT_EQ(shared.response_tokens, 56 * 17);
  EXPECT_EQ(shared.decode_steps, 17);
  // 16 rows of every response: its last token has none.
  const std::int64_t row = kv_bytes_per_token(model->shape, DType::float64);
  EXPECT_EQ(shared.kv_bytes, row * (shared.prompt_rows_physical + 56 * 16));
  EXPECT_EQ(shared.kv_bytes_unshared, row * (8 * kAll + 56 * 16));
  SamplingSettings off = settings;
  off.share_prompts = false;
  const GenerateReport unshared = sample(*model, prompts, off).report;
  EXPECT_EQ(unshared.prompt_rows_physical, 8 * kAll);
  EXPECT_EQ(unshared.kv_bytes, shared.kv_bytes_unshared);
}

TEST(Sampler, AFinishedResponseFreesItsPlace) {
  const auto model = tiny_model("qwen3", DType::float64, kSeed);
  SamplingSettings settings = drawn(30, 60);
  settings.max_num_seqs = 4;
  const Generated sampled = sample(*model, make_prompts({12, 5}, kVocabulary, kSeed), settings);
  // Four places that never stand empty but at the end: as many steps as a quarter of the tokens, and one response more.
  EXPECT_LE(sampled.report.decode_steps, sampled.report.response_tokens / 4 + 60);
  EXPECT_GE(sampled.report.decode_steps, sampled.report.response_tokens / 4);
}

TEST(Sampler, GroupsAreThePromptsOwnOrTheirOrdinals) {
  const auto model = tiny_model("qwen3", DType::float64, kSeed);
  std::vector<Prompt> prompts = make_prompts({3, 4}, kVocabulary, kSeed);
  EXPECT_EQ(sample(*model, prompts, greedy(2, 2)).rollouts[3].group, "1");
  prompts[0].group = R"("a")", prompts[1].group = "17";
  prompts[1].carried = R"({"id":5})";
  const auto found = sample(*model, prompts, greedy(2, 2)).rollouts;
  EXPECT_EQ(found[1].group, R"("a")");
  EXPECT_EQ(found[2].group, "17");
  EXPECT_EQ(found[2].carried, R"({"id":5,"finish_reason":"length"})");
}

TEST(Sampler, APromptThatFillsThePositionsIsAnsweredBeyondThem) {
  const auto model = tiny_model("qwen3", DType::float64, kSeed);
  model->decoder.reserve_positions(261);
  EXPECT_EQ(sample(*model, make_prompts({256}, kVocabulary, kSeed), greedy(1, 5)).rollouts.front().response_ids.size(),
            5u);
}

TEST(Sampler, RefusesWhatItCannotRun) {
  const auto model = tiny_model("qwen3", DType::float64, kSeed);
  const auto run = [&](std::vector<Prompt> prompts, SamplingSettings settings) { sample(*model, prompts, settings); };
  const std::vector<Prompt> prompts = make_prompts({3}, kVocabulary, kSeed);
  SamplingSettings settings = greedy(1, 5);
  settings.top_p = 0;
  EXPECT_THROW(run(prompts, settings), OptionError);
  settings = greedy(0, 5);
  EXPECT_THROW(run(prompts, settings), OptionError);
  settings = greedy(1, 5);
  settings.temperature = -1;
  EXPECT_THROW(run(prompts, settings), OptionError);
  EXPECT_THROW(run({Prompt{}}, greedy(1, 5)), InputError);
  std::vector<Prompt> beyond = prompts;
  beyond[0].ids[1] = kVocabulary;
  EXPECT_THROW(run(beyond, greedy(1, 5)), InputError);
  settings = greedy(1, 5);
  settings.kv_limit_bytes = 6 * kv_bytes_per_token(model->shape, DType::float64);
  EXPECT_THROW(run(prompts, settings), MemoryBudgetError);
  bound_device().to_device(at::full(model->weights.sizes(), std::nan(""), model->weights.scalar_type()),
                           model->weights);
  EXPECT_THROW(run(prompts, greedy(1, 5)), InputError);
}

TEST(Sampler, NoPromptsGiveNoResponses) {
  const auto model = tiny_model("qwen3", DType::float64, kSeed);
  EXPECT_TRUE(sample(*model, {}, greedy(2, 5)).rollouts.empty());
}

}  // namespace
}  // namespace espalier::testing
