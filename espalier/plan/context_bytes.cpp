#include "espalier/plan/context_bytes.h"

#include <algorithm>
#include <functional>

#include "espalier/device/buffers.h"
#include "espalier/plan/row_shares.h"

namespace espalier {

PhaseBytes bytes_over_cp(const StepPlan& plan, std::span<const Rollout> batch, const LocalShape& shape, DType dtype,
                         const StepKind& kind, bool counts, std::int64_t ranks) {
  const ModelShape& own = shape.own();
  const ElementBytes bytes = element_bytes(dtype);
  PhaseBytes out;
  const std::function<void(const PlanItem&)> add = [&](const PlanItem& item) {
    std::ranges::for_each(item.below, add);
    if (!is_divided(item, ranks)) return;
    const std::int64_t numbers = 2 * own.layers * RowShares(item.set.rows, ranks).most() * own.kv_heads * own.head_dim;
    const std::int64_t gather = numbers * bytes.activation, to_owners = ranks * numbers * bytes.accumulator;
    const auto edges = static_cast<std::int64_t>(edges_of(item.set, batch, plan.all_logprobs).size());
    std::int64_t control = kind.whole_rollout ? 16 * edges : 0;
    if (counts) control += 8 * own.layers * own.experts * static_cast<std::int64_t>(item.set.rollouts.size());
    const bool trunk = item.kind == ItemKind::trunk;
    std::int64_t &forward = trunk ? out.a : out.b, &backward = trunk ? out.c : out.b;
    forward += gather + control;
    if (!kind.gradients) return;
    backward += to_owners + control;
    if (!trunk) backward += (item.state.recomputes_attention() ? 2 : 1) * gather;
  };
  std::ranges::for_each(plan.items, add);
  return out;
}

}  // namespace espalier
