#include "espalier/execute/item_run.h"

#include <algorithm>

#include "espalier/base/error.h"
#include "espalier/device/host_values.h"
#include "espalier/model/joined_experts.h"
#include "espalier/model/path_source.h"
#include "espalier/model/sharded_source.h"
#include "espalier/model/stage_link.h"
#include "espalier/ops/operations.h"

namespace espalier {
namespace {

std::unique_ptr<KvSource> make_source(const StepRun& step, const PlanItem& item, const ItemInput& input, Arena& arena) {
  const bool is_trunk = item.kind == ItemKind::trunk;
  const Decoder& decoder = step.decoder;
  if (!input.shares)
    return std::make_unique<PathSource>(step.path, item.path_rows, is_trunk, input.subtree_end_S, input.depth_S,
                                        decoder.shape().states() > 0 ? runs_of(item.set) : std::vector<RowRun>());
  std::optional<SharedStates> states;
  if (decoder.shape().states() > 0)
    states.emplace(step.path, item.path_rows, is_trunk, SharedRuns(item.set, *input.shares), decoder.mesh().cp);
  return std::make_unique<ShardedSource>(step.path, item.path_rows, is_trunk, input.subtree_end_S, input.depth_S,
                                         *input.shares, input.sharded, decoder.sizes(), decoder.dtype(),
                                         decoder.mesh().cp, arena, std::move(states));
}

OpenPath::States take_states(const StepRun& step, const PlanItem& item, Arena& arena) {
  if (item.kind != ItemKind::trunk) return {};
  const StateBuffers declared(step.decoder.sizes(), step.trains());
  const auto take = [&](BufferList::Place place) { return arena.take(declared, place, step.decoder.dtype()); };
  return {take(declared.states_N), take(declared.grad_states_N)};
}

bool needs_whole_rollout(const StepRun& step) { return step.trains() && step.head->needs_whole_rollout(); }

Guest* gradients_guest(const StepRun& step) { return step.trains() ? step.gradients->guest() : nullptr; }

// Runs `work` at the head's stop, where the pass has it.
template <class Work>
void at_head(const StepRun& step, Pass pass, Work&& work) {
  if (step.head == nullptr) return;
  const HeadGradient when = !step.trains()              ? HeadGradient::none
                            : needs_whole_rollout(step) ? HeadGradient::in_backward
                                                        : HeadGradient::in_forward;
  const std::optional<Stop> stop = head_stop(step.decoder.local(), pass, when);
  if (!stop) return;
  const TimedPart timed(step.timer, part::kHead);
  walk({&*stop, 1}, {step.decoder.gathering(), gradients_guest(step)}, [&](const Stop&) { work(); });
}

}  // namespace

void join(const StepRun& step, Pass pass, bool on_path) {
  const bool backward = pass == Pass::backward;
  JoinedPath path(step.path);
  JoinedExperts experts(step.decoder, step.arena, backward ? &step.gradients->views() : nullptr);
  if (backward) at_head(step, pass, [] {});
  walk(decoder_stops(step.decoder.local(), pass),
       {step.decoder.gathering(), backward ? gradients_guest(step) : nullptr, on_path ? &path : nullptr, &experts});
  if (!backward) at_head(step, pass, [] {});
}

ItemRun::ItemRun(const StepRun& step, const PlanItem& item, Arena& arena)
    : step_(step),
      item_(item),
      arena_(arena),
      input_(item, step.rollouts, step.decoder.local(), step.all_logprobs, step.accounting, step.choices,
             step.decoder.device(), step.decoder.mesh().cp),
      states_(take_states(step, item, arena)),
      kv_(make_source(step, item, input_, arena)),
      path_(step.path, item.path_rows) {}

void ItemRun::forward() {
  const Decoder& decoder = step_.decoder;
  if (decoder.local().is_last_stage()) {
    const ItemBuffers item(decoder.sizes(), input_.model.outputs(), step_.trains());
    grad_normed_OM_ = arena_.take(item, item.grad_normed_OM, decoder.dtype());
  }
  if (step_.trains() && item_.state.stores() && decoder.has_backward()) {
    ESPALIER_INTERNAL(step_.spill != nullptr, "a plan that stores trunks away, and no place for them");
    sleeping_ = std::make_unique<SleepingTrunk>(arena_, *step_.spill, saved_, decoder.first_layer());
  }
  {
    const TimedPart timed(step_.timer, part::kRows);
    DecoderForward rows(decoder, decoder_run(), step_.trains() ? std::optional(item_.state) : std::nullopt, saved_);
    StageLink link(decoder, rows.stream_TM());
    walk(decoder_stops(decoder.local(), Pass::forward), {&link, decoder.gathering(), sleeping_.get(), &path_},
         [&](const Stop& stop) { rows.run(stop); });
    rows.finish();
  }
  take_choices();
  join_counts();
  at_head(step_, Pass::forward, [&] {
    step_.head->score(head_work());
    if (needs_whole_rollout(step_)) step_.head->finish_rollouts(item_);
  });
}

void ItemRun::add_backward(const at::Tensor& penalty_L2) {
  const Decoder& decoder = step_.decoder;
  join_counts();
  at_head(step_, Pass::backward, [&] { step_.head->add_backward(head_work()); });
  const RouterPenalties router = penalties(penalty_L2);
  const TimedPart timed(step_.timer, part::kRows);
  DecoderBackward rows(decoder, decoder_run(), saved_, grad_normed_OM_, step_.gradients->views(), router);
  StageLink link(decoder, rows.grad_stream_TM());
  walk(decoder_stops(decoder.local(), Pass::backward),
       {&link, decoder.gathering(), gradients_guest(step_), sleeping_.get(), &path_},
       [&](const Stop& stop) { rows.run(stop); });
}

// Takes the routers' choices, for callers that count them or write them down.
void ItemRun::take_choices() {
  if (!input_.model.keeps_choices) return;
  const ModelShape& shape = step_.decoder.shape();
  const at::Tensor choice_LTK = step_.decoder.device().to_host(saved_.choice_LTK);
  const std::int64_t of_layer = choice_LTK.size(1) * shape.experts_per_token;
  const std::int32_t* choice = host_values<const std::int32_t>(choice_LTK).data();
  const LocalShape& local = step_.decoder.local();
  std::int64_t place = local.expert_layers_before();
  for (std::int64_t layer = 0; layer < shape.layers(); ++layer) {
    if (!shape.has_experts(layer)) continue;
    // A narrow last block sees output rows alone: their choices are not the choices of all tokens.
    const bool narrow = local.is_last_stage() && layer + 1 == shape.layers() && !input_.model.all_rows_choose;
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
  for (std::int64_t layer = 0; layer < shape.layers(); ++layer) {
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
