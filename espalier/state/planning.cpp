#include "espalier/state/planning.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

#include "espalier/device/cuda_library.h"
#include "espalier/device/device.h"
#include "espalier/grouping/prefix_tree.h"
#include "espalier/ops/operations.h"
#include "espalier/parallel/agreement.h"
#include "espalier/plan/dealing.h"
#include "espalier/plan/planner.h"
#include "espalier/plan/rank_layout.h"
#include "espalier/saved/store.h"

namespace espalier {

Budget budget_of(const Options& options, int local_ranks) {
  static std::mutex mutex;
  static std::map<const Device*, Budget> automatic;
  if (const Budget given = given_budget(options); given.given) return given;
  const std::lock_guard lock(mutex);
  Device& device = bound_device();
  const auto found = automatic.find(&device);
  if (found != automatic.end()) return found->second;
  return automatic[&device] =
             automatic_budget(device.held_bytes(), device.free_bytes(), device.sharing_memory(local_ranks));
}

std::int64_t sampling_bytes(const LocalShape& shape, DType dtype, std::int64_t rows) {
  const ActivationBytes bytes(shape, dtype, kForwardOnly);
  return bytes.forward_peak({.rows = rows, .outputs = rows}, SavedState::keep, true) +
         bytes.scratch(rows, 0, at::get_num_threads());
}

namespace {

constexpr const char* kPlan = "the plan of a step";
constexpr const char* kSameInput = "give every rank the same input files, options and version of Espalier";

void add_items(Fingerprint& fingerprint, const std::vector<PlanItem>& items) {
  for (const PlanItem& item : items) {
    for (const RowSegment& segment : item.set.segments) fingerprint.add_number(segment);
    fingerprint.add_number(item.kind);
    fingerprint.add_number(item.state);
    fingerprint.add_number(item.path_rows);
    fingerprint.add_number(item.cp_rank);
    add_items(fingerprint, item.below);
  }
}

// Before the first row: ranks of one place on the axis of dp have the same rows, in the same order.
void require_same_plan(const StepPlan& plan, const Mesh& mesh) {
  Fingerprint fingerprint;
  fingerprint.add_number(plan.path.layers_awake);
  fingerprint.add_number(plan.path.sharded);
  add_items(fingerprint, plan.items);
  for (Group* group : {&mesh.tp, &mesh.cp, &mesh.pp}) require_same(*group, kPlan, fingerprint.value(), kSameInput);
}

// The least bytes that a rank has.
std::int64_t least_over_ranks(std::int64_t bytes, const Mesh& mesh) {
  return static_cast<std::int64_t>(-maxima_over_ranks(mesh.world, {-static_cast<double>(bytes)}).front());
}

// The trees of this rank.
std::vector<PrefixTree> dealt_trees(std::vector<PrefixTree> trees, const LocalShape& shape, const PlanOptions& options,
                                    const MachineProfile& machine, std::span<const Rollout> rollouts,
                                    const Mesh& mesh) {
  if (mesh.dp.size() == 1) return trees;
  std::vector<std::vector<PrefixTree>> dealt =
      deal_trees(std::move(trees), mesh.dp.size(), rollouts, shape, options, machine).by_rank;
  Fingerprint fingerprint;
  fingerprint.add_number(options.memory_budget);
  for (std::size_t rank = 0; rank < dealt.size(); ++rank)
    for (const PrefixTree& tree : dealt[rank])
      for (const std::int32_t rollout : tree.leaf_order) fingerprint.add_number(rollout), fingerprint.add_number(rank);
  require_same(mesh.dp, kPlan, fingerprint.value(), kSameInput);
  return std::move(dealt[static_cast<std::size_t>(mesh.dp.rank())]);
}

// With stages, shares and communication; other ranks of dp are taken to have as much.
void set_cost_of_ranks(StepPlan& plan, const LocalShape& shape, const PlanOptions& options,
                       const MachineProfile& machine, std::span<const Rollout> rollouts, const Mesh& mesh) {
  const std::vector<const StepPlan*> by_dp(static_cast<std::size_t>(mesh.dp.size()), &plan);
  const StepForecast found = forecast(by_dp, mesh.dp.rank(), rollouts, shape, options, machine);
  plan.chosen.seconds = found.seconds();
  const PlanCost& own = found.stages[static_cast<std::size_t>(mesh.pp.rank())].cost;
  plan.chosen.bytes = own.bytes;
  plan.chosen.stored_bytes = own.stored_bytes, plan.chosen.path_stored_bytes = own.path_stored_bytes;
  plan.chosen.flops = 0;
  for (const RankCost& stage : found.stages) plan.chosen.flops += stage.flops_of_all;
}

}  // namespace

DeviceTraits bound_traits(const Options& options, const MachineProfile& machine) {
  const bool gpu = !opened_gpu().name.empty() && !opened_gpu().emulated;
  return {.cuda = gpu,
          .opened = gpu,
          .queued = !bound_device().in_host_memory(),
          .writes_sums = bound_device().operations().writes_sums,
          .attention = machine.attention_kernels,
          .deterministic = options.deterministic == OnOff::on,
          .adds_in_turn = bound_device().operations().adds_in_turn};
}

StepPlan plan_step(const LocalShape& shape, const Options& options, const MachineProfile& machine,
                   std::span<const Rollout> rollouts, bool all_logprobs, const StepKind& kind, const HeldState& held,
                   const Mesh& mesh) {
  PlanOptions plan_options = plan_options_of(options);
  plan_options.all_logprobs = all_logprobs;
  plan_options.kind = kind;
  plan_options.setting = {held, bound_traits(options, machine)};
  plan_options.spill_room = least_over_ranks(room_to_store(bound_device(), options.spill_dir) / mesh.local_ranks, mesh);
  plan_options.memory_budget = budget_of(options, mesh.local_ranks).bytes;
  if (options.memory_budget.empty()) plan_options.memory_budget = least_over_ranks(plan_options.memory_budget, mesh);
  const std::vector<PrefixTree> trees =
      dealt_trees(build_prefix_trees(rollouts, options.share), shape, plan_options, machine, rollouts, mesh);
  StepPlan plan = make_plan(rollouts, trees, shape, plan_options, machine);
  deal_waves(plan.items, mesh.cp.size());
  require_same_plan(plan, mesh);
  if (mesh.world.size() > 1) set_cost_of_ranks(plan, shape, plan_options, machine, rollouts, mesh);
  return plan;
}

void StepsFit::add(std::span<const HeldModel> held, const Options& options, const MachineProfile& machine,
                   std::span<const Rollout> rollouts, bool all_logprobs, const Mesh& mesh) {
  for (const HeldModel& model : held) {
    const ModelShape& shape = model.shape.whole();
    const StepKind kind =
        model.state.gradients ? step_kind_of(options, shape, rollouts) : forward_kind_of(shape, rollouts);
    HeldState state = model.state;
    state.beside_bytes = bytes_beside(model, held, options.dtype);
    try {
      plan_step(model.shape.last_stage(), options, machine, rollouts, all_logprobs, kind, state, mesh);
    } catch (const StepTooLarge& step) {
      if (!worst_ || step.needed > worst_->needed) worst_ = step;
    }
  }
}

void StepsFit::require() const {
  if (worst_) throw *worst_;
}

}  // namespace espalier
