// A plan item's rows as the model and the head read them.
//
// Shapes: T rows, O output rows, E edges, S rows of the item's set. If the set is sharded over cp, this rank has T of
// its rows, and every member refers to these T rows unless it is named after the set; otherwise T = S. An output row is
// a row with loss edges. A row shared by rollouts of different temperatures occurs once for each temperature. For a
// critic it occurs once, because temperatures and recorded experts belong to the policy.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "espalier/model/chosen_experts.h"
#include "espalier/model/load_accounting.h"
#include "espalier/model/model_input.h"
#include "espalier/model/sharded_source.h"
#include "espalier/objective/fused_head.h"
#include "espalier/program/step_plan.h"
#include "espalier/rollout/rollout.h"
#include "espalier/shape/local_shape.h"

namespace espalier {

struct ItemInput {
  // Builds the input on the host and copies it to the device in one transfer. `accounting` may be null. The item must
  // outlive the object, because owners point into it; the object must not move.
  ItemInput(const PlanItem& item, std::span<const Rollout> rollouts, const LocalShape& local, bool all_logprobs,
            const moe::LoadAccounting* accounting, const moe::ChoiceRecord& choices, Device& device, const Group& cp);

  const std::optional<RowShares> shares;  // the split of the set's rows over cp; none: this rank has all rows
  const RowSet share;                     // this rank's rows, if there are shares
  const RowSet& rows;                     // the rows of this rank: the share or the item's set
  ModelInput model;
  at::Tensor subtree_end_S;            // of the device
  at::Tensor depth_S;                  // on the device; defined if the model has layers with a window
  ShardedRows sharded;                 // set if there are shares
  std::vector<LossEdge> set_edges;     // edges of all ranks' rows, if there are shares
  std::vector<LossEdge> edges;         // [E], ordered by output row
  std::vector<std::int32_t> output;    // [E], the output row of each
  HeadEdges head_edges;                // the same edges in the form that the head reads
  std::vector<moe::RowOwners> owners;  // of all rows, in order; empty if no loads are counted
};

}  // namespace espalier
