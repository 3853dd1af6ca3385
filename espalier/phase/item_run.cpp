#include "espalier/phase/item_run.h"

#include <ATen/ATen.h>

namespace espalier {
namespace {

Keep what_to_keep(const StepRun& step, const PlanItem& item) {
  if (!step.trains()) return Keep::nothing;
  return item.kind == ItemKind::trunk && item.state == TrunkState::recompute ? Keep::streams : Keep::everything;
}

}  // namespace

ItemRun::ItemRun(const StepRun& step, const PlanItem& item)
    : step_(step),
      item_(item),
      rows_(make_item_rows(item, step.batch, step.all_logprobs, step.decoder.shape().value_head, step.accounting,
                           step.choices)) {}

void ItemRun::forward() {
  if (step_.trains())
    grad_normed_OM_ = step_.arena.take({rows_.rows.outputs(), step_.decoder.shape().hidden}, step_.decoder.dtype());
  saved_ = step_.decoder.forward(rows_.rows, step_.path, what_to_keep(step_, item_), step_.arena, step_.timer);
  if (!step_.head) return;
  const TimedPart timed(step_.timer, part::kHead);
  step_.head->score(head_work());
  if (step_.trains() && step_.head->needs_whole_rollout()) step_.head->finish_rollouts(item_);
}

void ItemRun::backward() {
  if (step_.head->needs_whole_rollout()) {
    const TimedPart timed(step_.timer, part::kHead);
    step_.head->backward(head_work());
  }
  step_.decoder.backward(rows_.rows, step_.path, saved_, grad_normed_OM_, step_.gradients->views(), step_.arena,
                         step_.timer);
}

}  // namespace espalier
