// Which experts the tokens of a mini-batch chose: written down in one run and given to others, so that these differ by
// rounding alone. Where a router is nearly tied, rounding decides what it chooses.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/grouping/prefix_tree.h"
#include "espalier/program/step_plan.h"
#include "espalier/rollout/rollout.h"
#include "espalier/shape/model_shape.h"

namespace espalier::moe {

// A choice is that of one token in one layer: a set of k experts.
struct ChoiceDifference {
  std::int64_t choices = 0, differing = 0;
  double share() const { return choices > 0 ? static_cast<double>(differing) / static_cast<double>(choices) : 0; }
};

class ChosenExperts {
 public:
  // Nothing is known yet. `shape` must have experts.
  ChosenExperts(const ModelShape& shape, std::span<const Rollout> rollouts);

  // The experts of a token, [expert layers, k], ascending in each layer, as in RecordedExperts. A layer whose first one
  // is RecordedExperts::kFree is not known: the token did not run there.
  std::uint16_t* at(std::int32_t rollout, std::int32_t depth) { return ids_[rollout].data() + depth * width(); }
  const std::uint16_t* at(std::int32_t rollout, std::int32_t depth) const {
    return ids_[rollout].data() + depth * width();
  }

  // Writes what the rows of a set chose in one layer with experts, the place-th, [R, k] in any order: R are the rows of
  // the segments, or those that `rows` names.
  void write(std::span<const RowSegment> segments, std::int64_t place, const std::int32_t* choice_RK,
             const std::vector<std::int32_t>* rows);

  // Gives a token that rollouts share, in every layer, the experts of the first of these rollouts (in the order of the
  // mini-batch) where they are known. Returns how many known choices that changed. `trees`: of the same rollouts.
  std::int64_t unite(std::span<const PrefixTree> trees);

  // All of it as numbers, 0 where nothing is known: those of ranks that ran other rollouts each can be added up.
  std::vector<std::int64_t> numbers() const;
  void take(std::span<const std::int64_t> numbers);

  // The same choices of the rollouts in reverse order.
  ChosenExperts reversed() const;

  // Over the choices that both know. Tokens with a record in `recorded` (the same rollouts, or empty) did not choose
  // and do not count.
  ChoiceDifference difference(const ChosenExperts& other, std::span<const Rollout> recorded) const;

 private:
  std::int64_t width() const { return layers_ * chosen_; }

  std::int64_t layers_, chosen_;                 // expert layers, k
  std::vector<std::vector<std::uint16_t>> ids_;  // by rollout: [tokens, layers, k]
};

// Use of choices in a run; null: none.
struct ChoiceRecord {
  ChosenExperts* written = nullptr;      // gets those of every row, for the rollout that its segment names
  const ChosenExperts* given = nullptr;  // taken where known; what rollouts record is then not read
};

}  // namespace espalier::moe
