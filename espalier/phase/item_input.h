// A plan item's rows as the model and the head read them.
//
// Shapes: T rows, O output rows, E edges. An output row is a row with loss edges; where rollouts of different
// temperatures meet in one row it stands once for each temperature. For a critic it stands once: temperatures and
// recorded experts are the policy's.
#pragma once

#include <span>
#include <vector>

#include "espalier/model/model_input.h"
#include "espalier/moe/chosen_experts.h"
#include "espalier/moe/load_accounting.h"
#include "espalier/objective/fused_head.h"
#include "espalier/plan/step_plan.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

struct ItemInput {
  // Makes them on the host and hands them over to the device in one copy. `accounting` may be null. The item must
  // outlive the object, for owners point into it.
  ItemInput(const PlanItem& item, std::span<const Rollout> rollouts, const ModelShape& shape, bool all_logprobs,
            const moe::LoadAccounting* accounting, const moe::ChoiceRecord& choices, Device& device);

  ModelInput model;
  std::vector<std::int32_t> subtree_end;  // [T]
  at::Tensor subtree_end_T;               // of the device
  std::vector<LossEdge> edges;            // [E], ordered by output row
  std::vector<std::int32_t> output;       // [E], the output row of each
  HeadEdges head_edges;                   // the same edges as the head reads them
  std::vector<moe::RowOwners> owners;     // of all rows, in order; empty where no loads are counted
};

}  // namespace espalier
