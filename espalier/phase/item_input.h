// A plan item's rows as the model and the head read them.
//
// Shapes: T rows, O output rows, E edges, S rows of the item's set. Where the ranks of cp divide the set, T rows of it
// are here, and all but the set's own members speak of them; else T is S. An output row is a row with loss edges; where
// rollouts of different temperatures meet in one row it stands once for each temperature. For a critic it stands once:
// temperatures and recorded experts are the policy's.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "espalier/model/divided_source.h"
#include "espalier/model/model_input.h"
#include "espalier/moe/chosen_experts.h"
#include "espalier/moe/load_accounting.h"
#include "espalier/objective/fused_head.h"
#include "espalier/program/step_plan.h"
#include "espalier/rollout/rollout.h"
#include "espalier/shape/local_shape.h"

namespace espalier {

struct ItemInput {
  // Makes them on the host and hands them over to the device in one copy. `accounting` may be null. The item must
  // outlive the object, for owners point into it; the object must not move.
  ItemInput(const PlanItem& item, std::span<const Rollout> rollouts, const LocalShape& local, bool all_logprobs,
            const moe::LoadAccounting* accounting, const moe::ChoiceRecord& choices, Device& device, const Group& cp);

  const std::optional<RowShares> shares;  // of the set's rows; none: all are here
  const RowSet share;                     // of this rank, where there are shares
  const RowSet& rows;                     // that are here: the share or the item's set
  ModelInput model;
  at::Tensor subtree_end_S;            // of the device
  at::Tensor depth_S;                  // of the device, where the model has layers with a window
  DividedRows divided;                 // where there are shares
  std::vector<LossEdge> set_edges;     // of the rows of all ranks, where there are shares
  std::vector<LossEdge> edges;         // [E], ordered by output row
  std::vector<std::int32_t> output;    // [E], the output row of each
  HeadEdges head_edges;                // the same edges as the head reads them
  std::vector<moe::RowOwners> owners;  // of all rows, in order; empty where no loads are counted
};

}  // namespace espalier
