// One plan item on its way: forward with its log-probs and losses, later its backward.
#pragma once

#include "espalier/phase/item_rows.h"
#include "espalier/phase/step_run.h"

namespace espalier {

class ItemRun {
 public:
  // Takes what it needs from the step's arena; the caller releases it after backward.
  ItemRun(StepRun& step, const PlanItem& item);

  // Forwards the rows and computes the log-probs of their edges. Token-level objectives take their derivative in the
  // same pass over the vocabulary; sequence-level ones are evaluated for the rollouts whose last log-prob this was.
  void forward();

  // Adds the gradients of every parameter and of the path above. A trunk's comes after everything below it.
  void backward();

 private:
  HeadProblem head_problem() const;
  void score();
  void score_with_gradient();
  void finish_rollouts();
  RolloutSeries& series_of(const LossEdge& edge) { return step_.series[static_cast<std::size_t>(edge.rollout)]; }

  StepRun& step_;
  const PlanItem& item_;
  ItemRows rows_;
  DecoderSaved saved_;
  at::Tensor grad_normed_OM_;
};

}  // namespace espalier
