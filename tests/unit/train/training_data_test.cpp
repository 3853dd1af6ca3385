// Mini-batches cut from recorded rollouts: every rollout once, groups whole, advantages computed over the group.
#include "espalier/data/training_data.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "espalier/base/error.h"
#include "espalier/rollout/record_data.h"
#include "tests/support/make_rollouts.h"

namespace espalier {
namespace {

std::vector<Rollout> drawn(std::int64_t groups, std::uint64_t seed = 3) {
  testing::RolloutOptions options;
  options.groups = groups, options.group_size = {3, 5};
  options.rewards = true, options.token_advantages = false;
  return testing::make_rollouts(options, seed);
}

Options with_mini_batches(std::int64_t size) {
  Options options;
  options.mini_batch_size = size;
  return options;
}

TEST(TrainingData, MiniBatchesHaveEveryRolloutOnce) {
  for (const std::int64_t size : {0, 1, 4, 7, 1000}) {
    const TrainingData data(drawn(6), with_mini_batches(size));
    std::multiset<std::int64_t> seen;
    for (std::int64_t batch = 0; batch < data.mini_batches(); ++batch) {
      const MiniBatch part = data.mini_batch(batch);
      EXPECT_EQ(part.advantages.size(), part.rollouts.size());
      for (const Rollout& rollout : part.rollouts) seen.insert(rollout.index);
    }
    EXPECT_EQ(seen.size(), data.rollouts().size()) << size;
    EXPECT_EQ(std::set(seen.begin(), seen.end()).size(), seen.size()) << size;
  }
}

TEST(TrainingData, AdvantagesDoNotDependOnMiniBatches) {
  const TrainingData whole(drawn(6), with_mini_batches(0)), cut(drawn(6), with_mini_batches(4));
  ASSERT_GT(cut.mini_batches(), 1);
  const auto expected = whole.mini_batch(0).advantages;
  std::size_t at = 0;
  for (std::int64_t batch = 0; batch < cut.mini_batches(); ++batch)
    for (const auto& advantages : cut.mini_batch(batch).advantages) EXPECT_EQ(advantages, expected[at++]);
  EXPECT_EQ(at, expected.size());
}

TEST(TrainingData, FingerprintsTellFilesApart) {
  const std::string of_file = TrainingData(drawn(3), {}).fingerprint();
  EXPECT_EQ(TrainingData(drawn(3), {}).fingerprint(), of_file);
  std::vector<Rollout> other_token = drawn(3), other_order = drawn(3), other_reward = drawn(3);
  other_token[1].prompt_ids[0] += 1;
  std::swap(other_order[0], other_order[1]);
  *other_reward[0].reward += 1;
  EXPECT_NE(TrainingData(std::move(other_token), {}).fingerprint(), of_file);
  EXPECT_NE(TrainingData(std::move(other_order), {}).fingerprint(), of_file);
  const TrainingData rewarded(std::move(other_reward), {});
  EXPECT_EQ(rewarded.fingerprint(), of_file) << "tokens and order alone";
  EXPECT_NE(rewarded.field_fingerprints(), TrainingData(drawn(3), {}).field_fingerprints());
}

// A row of the table of data that an update depends on is compared when a run continues, and between ranks.
TEST(TrainingData, EveryRowThatAnUpdateDependsOnHasAFingerprint) {
  const auto plain = TrainingData(drawn(3), {}).field_fingerprints();
  for (const SeriesRow& row : series_rows()) {
    std::vector<Rollout> other = drawn(3);
    for (Rollout& rollout : other) (rollout.*row.values).assign(rollout.response_ids.size(), -1);
    EXPECT_EQ(TrainingData(std::move(other), {}).field_fingerprints() != plain, row.use == DataUse::update) << row.name;
  }
  const std::vector<Rollout> same = drawn(3);
  for (const ScalarRow& row : scalar_rows()) {
    std::vector<Rollout> other = same;
    for (Rollout& rollout : other) {
      rollout.trajectory = std::to_string(&rollout - other.data());
      std::visit(
          [&](auto member) {
            using Value = std::decay_t<decltype(rollout.*member)>;
            if constexpr (std::is_same_v<Value, std::string>)
              rollout.*member = text_of(&rollout - other.data(), 0);
            else
              rollout.*member = static_cast<typename Value::value_type>(1);
          },
          row.value);
    }
    const auto found = TrainingData(std::move(other), {}).field_fingerprints();
    EXPECT_NE(found.at(std::string(row.name)), plain.at(std::string(row.name))) << row.name;
  }
}

}  // namespace
}  // namespace espalier
