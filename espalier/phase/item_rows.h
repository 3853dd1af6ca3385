// A plan item's rows as the model and the head read them.
//
// Shapes: T rows, O output rows, E edges. An output row is a row with loss edges; where rollouts of different
// temperatures meet in one row it stands once for each temperature. For a critic it stands once: temperatures and
// recorded experts are the policy's.
#pragma once

#include <span>
#include <vector>

#include "espalier/model/rows.h"
#include "espalier/moe/chosen_experts.h"
#include "espalier/objective/fused_head.h"
#include "espalier/plan/step_plan.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

struct ItemRows {
  Rows rows;
  std::vector<double> temperature;   // [O]
  std::vector<HeadEdge> head_edges;  // [E], ordered by output row
  std::vector<LossEdge> edges;       // [E], in the same order
};

// `critic`: the rows are a critic's. `accounting` may be null. The item must outlive the result: rows.owners point into
// it; so must what `choices` names.
ItemRows make_item_rows(const PlanItem& item, std::span<const Rollout> batch, bool all_logprobs, bool critic,
                        moe::LoadAccounting* accounting, const moe::ChoiceRecord& choices);

}  // namespace espalier
