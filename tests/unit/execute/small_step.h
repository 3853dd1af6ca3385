// A tiny model, the plan of one step, and a head whose loss is plain: what the executor does to them is seen without an
// objective, an optimizer or files.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "espalier/execute/stage.h"
#include "espalier/forecast/memory_model.h"
#include "espalier/saved/spill_queue.h"
#include "espalier/state/planning.h"
#include "espalier/step/step_path.h"
#include "tests/equivalence/fixture.h"

namespace espalier::testing {

inline std::int32_t longest_of(const std::vector<Rollout>& rollouts) {
  std::int32_t longest = 0;
  for (const Rollout& rollout : rollouts) longest = std::max(longest, rollout.length());
  return longest;
}

// Every item of a plan, trunks before what is below them.
inline void visit_items(const std::vector<PlanItem>& items, const std::function<void(const PlanItem&)>& visit) {
  for (const PlanItem& item : items) {
    visit(item);
    visit_items(item.below, visit);
  }
}

// An edge's rollout and position.
using EdgePlace = std::pair<std::int32_t, std::int32_t>;

// loss = sum over edges of w(edge) times the sum of the row that the edge leaves. It is the same under every plan.
class PlainHead : public Head {
 public:
  static double weight(const LossEdge& edge) { return 0.1 + 0.37 * edge.rollout - 0.21 * edge.position; }

  void score(const HeadWork& work) override {
    if (++items == fails_at) throw std::runtime_error("the head fails");
    if (work.input.edges.empty()) return;
    const at::Tensor sums_O = work.normed_OM.sum(1), slope_O = at::zeros_like(sums_O);
    for (std::size_t e = 0; e < work.input.edges.size(); ++e) {
      const LossEdge& edge = work.input.edges[e];
      ++times_scored[{edge.rollout, edge.position}];
      loss += weight(edge) * sums_O[work.input.output[e]].item<double>();
      slope_O[work.input.output[e]] += weight(edge);
    }
    if (work.grad_normed_OM.defined()) work.grad_normed_OM.copy_(slope_O.unsqueeze(1).expand_as(work.normed_OM));
  }

  int items = 0, fails_at = -1;  // counted from 1
  double loss = 0;
  std::map<EdgePlace, int> times_scored;
};

class SmallStep {
 public:
  explicit SmallStep(Case of, const Mesh& mesh = mesh_of_one())
      : c(std::move(of)),
        rollouts(make_rollouts(c.rollouts, c.seed)),
        model(tiny_model(c.family, DType::float64, c.seed, c.critic, mesh)),
        gradients(model->table, model->decoder.local(), at::kDouble, model->decoder.device(), mesh) {
    model->decoder.reserve_positions(longest_of(rollouts));
    c.options.dtype = "float64";
    plan = plan_step(model->decoder.local().last_stage(), c.options, default_profile("cpu", DType::float64, 1),
                     rollouts, false, StepKind{}, {.optimizer = false}, mesh);
  }

  // One pass of the plan. With gradients it overwrites them.
  RunResult run(Head& head, bool trains, const std::function<void(std::int64_t)>& on_rows = {}) {
    if (trains) gradients.zero();
    std::optional<SpillQueue> spill;
    if (const std::int64_t stored = plan.chosen.stored_bytes; stored > 0) {
      spill.emplace(store_of(arena.device(), ""), static_cast<int>(chunks_in_flight(stored)));
      spill->reserve(stored);
    }
    const ArenaScope scope(arena);
    StepPath path(model->decoder, plan, trains, arena, "");
    StepRun step{model->decoder, rollouts, *path, arena, &head, trains ? &gradients : nullptr};
    step.on_rows = on_rows, step.spill = spill ? &*spill : nullptr;
    return run_stage(step, plan);
  }

  Case c;
  std::vector<Rollout> rollouts;
  std::unique_ptr<ModelState> model;
  GradientSet gradients;
  Arena arena{std::int64_t{1} << 28, cpu_device()};
  StepPlan plan;
};

// A trunk inside a trunk, with waves below both.
inline Case nested_trunks() {
  Case c = with(ragged("qwen3"), {"", "phased", 6, "keep"});
  c.rollouts.groups = 2, c.rollouts.group_size = {4, 4};
  c.rollouts.prompt_length = {9, 12}, c.rollouts.response_length = {6, 9};
  c.rollouts.shared_start = 0.8, c.rollouts.nested_prompt = 1, c.rollouts.empty_response = 0;
  return c;
}

}  // namespace espalier::testing
