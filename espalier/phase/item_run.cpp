#include "espalier/phase/item_run.h"

#include <algorithm>

#include "espalier/base/error.h"
#include "espalier/device/host_values.h"
#include "espalier/ops/operations.h"

namespace espalier {
namespace {

Keep what_to_keep(const StepRun& step, const PlanItem& item) {
  if (!step.trains()) return Keep::nothing;
  return item.state == TrunkState::recompute ? Keep::streams : Keep::everything;
}

}  // namespace

ItemRun::ItemRun(const StepRun& step, const PlanItem& item)
    : step_(step),
      item_(item),
      input_(item, step.batch, step.decoder.local().whole(), step.all_logprobs, step.accounting, step.choices,
             step.decoder.device()) {}

void ItemRun::forward() {
  const ItemBuffers item(step_.decoder.block(), input_.model.outputs(), step_.trains());
  grad_normed_OM_ = step_.arena.take(item, item.grad_normed_OM, step_.decoder.dtype());
  if (step_.trains() && item_.state == TrunkState::offload) {
    ESPALIER_INTERNAL(step_.spill != nullptr, "a plan that stores trunks away, and no place for them");
    sleeping_ = std::make_unique<SleepingTrunk>(step_.arena, *step_.spill);
  }
  saved_ = step_.decoder.forward(input_.model, step_.path, what_to_keep(step_, item_), step_.arena, step_.timer,
                                 sleeping_.get());
  take_choices();
  if (!step_.head) return;
  const TimedPart timed(step_.timer, part::kHead);
  step_.head->score(head_work());
  if (step_.trains() && step_.head->needs_whole_rollout()) step_.head->finish_rollouts(item_);
}

void ItemRun::backward(const at::Tensor& penalties_L2) {
  if (step_.head->needs_whole_rollout()) {
    const TimedPart timed(step_.timer, part::kHead);
    step_.head->backward(head_work());
  }
  set_penalties(penalties_L2);
  step_.decoder.add_backward(input_.model, step_.path, saved_, grad_normed_OM_, step_.gradients->views(), step_.arena,
                             step_.timer, sleeping_.get());
}

// What the routers chose, for those who count it or write it down.
void ItemRun::take_choices() {
  if (!input_.model.keeps_choices) return;
  const ModelShape& shape = step_.decoder.shape();
  const at::Tensor choice_LTK = step_.decoder.device().to_host(saved_.choice_LTK);
  const std::int64_t of_layer = choice_LTK.size(1) * shape.experts_per_token;
  const std::int32_t* choice = host_values<const std::int32_t>(choice_LTK).data();
  std::int64_t place = 0;
  for (std::int64_t layer = 0; layer < shape.layers; ++layer) {
    if (!shape.has_experts(layer)) continue;
    // A narrow last block sees output rows alone: their choices are not those of all tokens.
    const bool narrow = layer + 1 == shape.layers && !input_.model.routes_all_rows;
    if (step_.accounting != nullptr && !narrow) step_.accounting->add_choices(layer, input_.owners, choice);
    if (step_.choices.written != nullptr)
      step_.choices.written->write(item_.set.segments, place, choice, narrow ? &input_.model.output_row : nullptr);
    choice += of_layer;
    ++place;
  }
}

void ItemRun::set_penalties(const at::Tensor& penalties_L2) {
  if (!penalties_L2.defined()) return;
  const ModelShape& shape = step_.decoder.shape();
  ModelInput& input = input_.model;
  input.penalty_L.resize(static_cast<std::size_t>(shape.expert_layers()));
  ControlBlock block;
  for (std::int64_t layer = 0, l = 0; layer < shape.layers; ++layer) {
    if (!shape.has_experts(layer)) continue;
    const moe::LoadAccounting::Penalty penalty = step_.accounting->penalty(layer, input_.owners);
    RouterPenalty& on_device = input.penalty_L[static_cast<std::size_t>(l++)];
    block.add(penalty.group_R, on_device.group_R);
    if (!penalty.probability_GE.empty()) block.add(penalty.probability_GE, on_device.probability_GE);
    if (!penalty.z_G.empty()) block.add(penalty.z_G, on_device.z_G);
  }
  block.hand_over(step_.decoder.device());
  input.penalties_L2 = penalties_L2;
}

}  // namespace espalier
