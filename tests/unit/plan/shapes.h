// Model shapes and plan builders that the planner's tests share.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/grouping/prefix_tree.h"
#include "espalier/plan/planner.h"

namespace espalier::testing {

ModelShape tiny_shape();  // 3 layers, hidden 64
ModelShape llama_3_8b();
ModelShape qwen3_30b_a3b();
MachineProfile test_profile();

// `count` responses of `response` tokens on one prompt; tokens of different responses differ.
std::vector<Rollout> group_of(std::int32_t prompt, std::int32_t response, std::int32_t count, std::int32_t first = 0);
StepPlan planned(const std::vector<Rollout>& batch, const PlanOptions& options,
                 ShareMode share = ShareMode::whole_trees, const LocalShape& shape = tiny_shape());

}  // namespace espalier::testing
