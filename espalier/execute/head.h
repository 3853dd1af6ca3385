// The layer on top of the decoder: log-probs (execute/language_head.h) or a critic's values (execute/critic_head.h). An
// item hands over the normalised hidden rows of its edges and gets back their gradient; everything else of a step,
// plan, trunks, waves and path, is the same for both.
//
// Shapes: O output rows, M width.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/execute/item_input.h"

namespace espalier {

struct HeadWork {
  const PlanItem& item;
  const ItemInput& input;
  at::Tensor normed_OM;
  at::Tensor grad_normed_OM;  // overwritten where there are edges; undefined in forward-only passes
};

class Head {
 public:
  virtual ~Head() = default;

  // True if the derivative of a token depends on the whole rollout. The head's gradient then comes from add_backward.
  virtual bool needs_whole_rollout() const { return false; }

  // Computes and keeps the outputs of the item's edges. With gradients, and if needs_whole_rollout() is false, it also
  // writes grad_normed and adds the gradients of the head's parameters in the same pass.
  virtual void score(const HeadWork& work) = 0;
  // Evaluates the objective for the rollouts whose last edge was in this item.
  virtual void finish_rollouts(const PlanItem&) {}
  // The backward if needs_whole_rollout() is true: writes grad_normed and adds the gradients of the head's parameters.
  virtual void add_backward(const HeadWork&) {}
};

}  // namespace espalier
