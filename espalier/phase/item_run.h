// One plan item on its way: forward with its log-probs and losses, later its backward.
#pragma once

#include "espalier/phase/item_input.h"
#include "espalier/phase/step_run.h"

namespace espalier {

class ItemRun {
 public:
  // Takes what it needs from the step's arena; the caller releases it after backward.
  ItemRun(const StepRun& step, const PlanItem& item);

  // Forwards the rows and has the head score their edges. Token-level objectives take their derivative in the same
  // pass; sequence-level ones are evaluated for the rollouts whose last log-prob this was.
  void forward();

  // Adds the gradients of every parameter and of the path above. A trunk's comes after everything below it.
  void backward();

  std::int64_t rows() const { return input_.model.rows(); }

 private:
  HeadWork head_work() const { return {item_, input_, saved_.normed_OM, grad_normed_OM_}; }
  void take_choices();
  void set_penalties();
  void take_penalties();

  const StepRun& step_;
  const PlanItem& item_;
  ItemInput input_;
  DecoderSaved saved_;
  at::Tensor grad_normed_OM_;
};

}  // namespace espalier
