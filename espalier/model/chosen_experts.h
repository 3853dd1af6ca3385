// The experts chosen by the tokens of a mini-batch: recorded in one run and given to others, so that the runs differ by
// rounding only. A nearly tied router would otherwise choose by rounding.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/grouping/prefix_tree.h"
#include "espalier/program/step_plan.h"
#include "espalier/rollout/rollout.h"
#include "espalier/shape/model_shape.h"

namespace espalier::moe {

// A choice is the set of k experts of one token in one layer.
struct ChoiceDifference {
  std::int64_t choices = 0, differing = 0;
  double share() const { return choices > 0 ? static_cast<double>(differing) / static_cast<double>(choices) : 0; }
};

class ChosenExperts {
 public:
  // Starts without choices. `shape` must have experts.
  ChosenExperts(const ModelShape& shape, std::span<const Rollout> rollouts);

  // The experts of a token, [expert layers, k], ascending in each layer, as in RecordedExperts. A layer is unknown if
  // its first expert is RecordedExperts::kFree: the token did not run there.
  std::uint16_t* at(std::int32_t rollout, std::int32_t depth) { return ids_[rollout].data() + depth * width(); }
  const std::uint16_t* at(std::int32_t rollout, std::int32_t depth) const {
    return ids_[rollout].data() + depth * width();
  }

  // Records the choices of a set's rows in expert layer number `place`, [R, k] in any order. R: the rows of the
  // segments, or the rows named by `rows`.
  void write(std::span<const RowSegment> segments, std::int64_t place, const std::int32_t* choice_RK,
             const std::vector<std::int32_t>* rows);

  // Gives a shared token, in every layer, the experts of the first of its rollouts (in the order of the mini-batch)
  // with a known choice. Returns the number of known choices that changed. `trees`: of the same rollouts.
  std::int64_t unite(std::span<const PrefixTree> trees);

  // All choices as numbers, 0 if unknown. Numbers of ranks that ran different rollouts can be summed.
  std::vector<std::int64_t> numbers() const;
  void take(std::span<const std::int64_t> numbers);

  // The same choices of the rollouts in reverse order.
  ChosenExperts reversed() const;

  // Compares choices known in both. Tokens with a record in `recorded` (the same rollouts, or empty) did not choose and
  // do not count.
  ChoiceDifference difference(const ChosenExperts& other, std::span<const Rollout> recorded) const;

 private:
  std::int64_t width() const { return layers_ * chosen_; }

  std::int64_t layers_, chosen_;                 // expert layers, k
  std::vector<std::vector<std::uint16_t>> ids_;  // by rollout: [tokens, layers, k]
};

// The use of choices in a run; null: none.
struct ChoiceRecord {
  ChosenExperts* written = nullptr;      // receives every row's choice, for the rollout named by its segment
  const ChosenExperts* given = nullptr;  // used if known; recorded experts of rollouts are then ignored
};

}  // namespace espalier::moe
