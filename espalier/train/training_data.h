// Recorded rollouts made ready for updates: advantages computed, mini-batches cut, each a contiguous range.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "espalier/observe/progress.h"
#include "espalier/options/options.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

struct MiniBatch {
  std::span<const Rollout> rollouts;
  std::span<const std::vector<double>> advantages;  // one series per rollout
};

class TrainingData {
 public:
  // Advantages are computed over the whole file, or over the records of one `step`, before mini-batches are cut.
  TrainingData(std::vector<Rollout> rollouts, const Options& options);

  std::int64_t mini_batches() const { return static_cast<std::int64_t>(begins_.size()) - 1; }
  MiniBatch mini_batch(std::int64_t index) const;
  const std::vector<Rollout>& rollouts() const { return rollouts_; }  // in mini-batch order; `index` has the file's
  std::int32_t longest() const;                                       // tokens of the longest rollout

  // Tells one file's tokens and order from another's, so that a resumed run knows whether its position still means
  // anything.
  std::string fingerprint() const;

 private:
  std::vector<Rollout> rollouts_;
  std::vector<std::vector<double>> advantages_;
  std::vector<std::size_t> begins_;
};

// Reads --rollouts, checking ids against the vocabulary; remarks go to progress.
std::vector<Rollout> read_for_model(const std::string& path, std::int64_t vocabulary, Progress& progress);

}  // namespace espalier
