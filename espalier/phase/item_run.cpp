#include "espalier/phase/item_run.h"

#include <algorithm>

#include "espalier/base/error.h"
#include "espalier/device/host_values.h"
#include "espalier/model/divided_source.h"
#include "espalier/model/path_source.h"
#include "espalier/ops/operations.h"

namespace espalier {
namespace {

std::unique_ptr<KvSource> make_source(const StepRun& step, const PlanItem& item, const ItemInput& input, Arena& arena) {
  const bool is_trunk = item.kind == ItemKind::trunk;
  const Decoder& decoder = step.decoder;
  if (!input.shares)
    return std::make_unique<PathSource>(step.path, item.path_rows, is_trunk, input.subtree_end_S, input.depth_S,
                                        decoder.shape().has_states() ? runs_of(item.set) : std::vector<RowRun>());
  return std::make_unique<DividedSource>(step.path, item.path_rows, is_trunk, input.subtree_end_S, input.depth_S,
                                         *input.shares, input.divided, decoder.block(), decoder.dtype(),
                                         decoder.mesh().cp, arena);
}

KvPath::States take_states(const StepRun& step, const PlanItem& item, Arena& arena) {
  if (item.kind != ItemKind::trunk) return {};
  const StateBuffers declared(step.decoder.block(), step.trains());
  const auto take = [&](BufferList::Place place) { return arena.take(declared, place, step.decoder.dtype()); };
  return {take(declared.states_LN), take(declared.grad_states_LN)};
}

// The unit of the head is together while `work` runs.
template <class Work>
void with_head(const StepRun& step, bool gradient, Work work) {
  const TimedPart timed(step.timer, part::kHead);
  const std::int64_t unit = head_unit(step.decoder.local().whole());
  step.decoder.weights().bring(unit);
  if (gradient) step.gradients->views().bring(unit);
  work();
  if (gradient) step.gradients->views().let_go(unit);
}

bool has_head(const StepRun& step) { return step.head != nullptr && step.decoder.is_last_stage(); }
bool needs_whole_rollout(const StepRun& step) { return step.trains() && step.head->needs_whole_rollout(); }

}  // namespace

void join_forward(const StepRun& step, bool on_path) {
  NoRows rows(on_path ? &step.path : nullptr);
  step.decoder.join_forward(step.arena, rows);
  if (has_head(step)) with_head(step, step.trains() && !needs_whole_rollout(step), [] {});
}

void join_backward(const StepRun& step, bool on_path) {
  NoRows rows(on_path ? &step.path : nullptr);
  if (has_head(step) && needs_whole_rollout(step)) with_head(step, true, [] {});
  step.decoder.join_backward(step.gradients->views(), step.arena, rows);
}

ItemRun::ItemRun(const StepRun& step, const PlanItem& item, Arena& arena)
    : step_(step),
      item_(item),
      arena_(arena),
      input_(item, step.rollouts, step.decoder.local(), step.all_logprobs, step.accounting, step.choices,
             step.decoder.device(), step.decoder.mesh().cp),
      states_(take_states(step, item, arena)),
      kv_(make_source(step, item, input_, arena)) {}

void ItemRun::forward() {
  if (step_.decoder.is_last_stage()) {
    const ItemBuffers item(step_.decoder.block(), input_.model.outputs(), step_.trains());
    grad_normed_OM_ = arena_.take(item, item.grad_normed_OM, step_.decoder.dtype());
  }
  if (step_.trains() && item_.state.stores() && step_.decoder.has_backward()) {
    ESPALIER_INTERNAL(step_.spill != nullptr, "a plan that stores trunks away, and no place for them");
    sleeping_ = std::make_unique<SleepingTrunk>(arena_, *step_.spill);
  }
  saved_ = step_.decoder.forward(decoder_run(), step_.trains() ? std::optional(item_.state) : std::nullopt);
  take_choices();
  join_counts();
  if (!has_head(step_)) return;
  const bool whole_rollout = needs_whole_rollout(step_);
  with_head(step_, step_.trains() && !whole_rollout, [&] {
    step_.head->score(head_work());
    if (whole_rollout) step_.head->finish_rollouts(item_);
  });
}

void ItemRun::add_backward(const at::Tensor& penalty_L2) {
  join_counts();
  if (has_head(step_) && needs_whole_rollout(step_))
    with_head(step_, true, [&] { step_.head->add_backward(head_work()); });
  step_.decoder.add_backward(decoder_run(), saved_, grad_normed_OM_, step_.gradients->views(), penalties(penalty_L2));
}

// What the routers chose, for those who count it or write it down.
void ItemRun::take_choices() {
  if (!input_.model.keeps_choices) return;
  const ModelShape& shape = step_.decoder.shape();
  const at::Tensor choice_LTK = step_.decoder.device().to_host(saved_.choice_LTK);
  const std::int64_t of_layer = choice_LTK.size(1) * shape.experts_per_token;
  const std::int32_t* choice = host_values<const std::int32_t>(choice_LTK).data();
  const LocalShape& local = step_.decoder.local();
  std::int64_t place = local.expert_layers_before();
  for (std::int64_t layer = 0; layer < shape.layers; ++layer) {
    if (!shape.has_experts(layer)) continue;
    // A narrow last block sees output rows alone: their choices are not those of all tokens.
    const bool narrow = step_.decoder.is_last_stage() && layer + 1 == shape.layers && !input_.model.all_rows_choose;
    if (step_.accounting != nullptr && !narrow)
      step_.accounting->add_choices(local.layers().begin + layer, input_.owners, choice);
    if (step_.choices.written != nullptr)
      step_.choices.written->write(input_.rows.segments, place, choice, narrow ? &input_.model.output_row : nullptr);
    choice += of_layer;
    ++place;
  }
}

void ItemRun::join_counts() {
  if (!input_.shares || !step_.trains() || step_.accounting == nullptr) return;
  std::vector<std::int64_t> counts = step_.accounting->not_joined(item_.set.rollouts);
  add_over_ranks(step_.decoder.mesh().cp, counts);
  step_.accounting->join(item_.set.rollouts, counts);
}

RouterPenalties ItemRun::penalties(const at::Tensor& value_L2) const {
  RouterPenalties out;
  if (!value_L2.defined()) return out;
  const ModelShape& shape = step_.decoder.shape();
  out.value_L2 = value_L2;
  out.of_layer.resize(static_cast<std::size_t>(shape.expert_layers()));
  ControlBlock block;
  auto on_device = out.of_layer.begin();
  for (std::int64_t layer = 0; layer < shape.layers; ++layer) {
    if (!shape.has_experts(layer)) continue;
    const moe::LoadAccounting::Penalty penalty =
        step_.accounting->penalty(step_.decoder.local().layers().begin + layer, input_.owners);
    block.add(penalty.group_R, on_device->group_R);
    if (!penalty.probability_GE.empty()) block.add(penalty.probability_GE, on_device->probability_GE);
    if (!penalty.z_G.empty()) block.add(penalty.z_G, on_device->z_G);
    ++on_device;
  }
  block.hand_over(step_.decoder.device());
  return out;
}

}  // namespace espalier
