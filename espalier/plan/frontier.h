// The capacity frontier: the longest prompt of a group that one step of a model runs within a memory budget.
//
// A group is n responses of equal length to one prompt. A dense step runs one rollout a micro-batch and never cuts it,
// a packed one the whole group at once; a phased one is what the planner makes of it, chains of trunks included.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "espalier/base/json_fwd.h"
#include "espalier/forecast/cost_model.h"
#include "espalier/parallel/degrees.h"
#include "espalier/plan/planner.h"
#include "espalier/shape/model_shape.h"

namespace espalier {

struct FrontierCell {
  enum class Limit { memory, positions, spill_room };

  std::int64_t n = 0;       // responses
  std::string way;          // "dense", "packed", "phased, keep", ...
  std::int64_t prompt = 0;  // tokens; 0: not even one fits
  Limit limit = Limit::memory;
  std::int64_t token_budget = 0;  // rows in one wave of that plan
  PlanCost cost;                  // of the step with that prompt

  std::int64_t total(std::int64_t response) const { return prompt == 0 ? 0 : prompt + response; }
};

struct FrontierRanks {
  Degrees degrees;
  Choice<Sharding> shard = Sharding::none;
};

struct Frontier {
  std::int64_t memory_budget = 0, response = 0;
  std::vector<std::string> ways;
  std::vector<std::int64_t> sizes;  // n, ascending
  std::vector<FrontierCell> cells;  // by size, then by way

  const FrontierCell& cell(std::size_t size, std::size_t way) const { return cells[size * ways.size() + way]; }
  // Tokens of a rollout over those of the dense cell with as many responses; 0 where that one holds none.
  double factor(std::size_t size, std::size_t way) const;
};

// `options` without schedule and trunk state, which the ways say; its memory budget is one. Stored state fits
// options.spill_room. On several ranks the budget and the room are those of one, and `ranks` says how they divide the
// model. Prompts end at the model's positions, and are found to within a 256th. Plans very many steps:
// seconds. `on_cell` is told how many cells are done; may be empty.
Frontier find_frontier(const ModelShape& shape, const PlanOptions& options, const MachineProfile& profile,
                       std::vector<std::int64_t> sizes, std::int64_t response, const FrontierRanks& ranks = {},
                       const std::function<void(std::int64_t cells)>& on_cell = {});

Json to_json(const Frontier& frontier);
std::string table_of(const Frontier& frontier);  // for a person

}  // namespace espalier
