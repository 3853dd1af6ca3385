// The capacity frontier: the longest prompt of a group that one step of a model runs within a memory budget.
//
// A group is n responses of equal length to one prompt. A dense step runs one rollout per micro-batch and never cuts
// it; a packed step runs the whole group at once; a phased step is the planner's choice, chains of trunks included.
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
  std::int64_t prompt = 0;  // tokens; 0: no prompt fits
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
  // Tokens of a rollout over the tokens of the dense cell with the same number of responses; 0 if the dense cell is 0.
  double factor(std::size_t size, std::size_t way) const;
};

// `options`: schedule and trunk state are ignored, because the ways set them; the memory budget must be set. Offloaded
// state must fit options.spill_room. On several ranks budget and spill room are per rank, and `ranks` is the layout.
// Prompts are limited by the model's positions and found to within a 256th. Takes seconds, because it plans very many
// steps. `on_cell` receives the number of finished cells; may be empty. Errors: OptionError if the response alone takes
// all positions, or if the layout does not divide the model.
Frontier find_frontier(const ModelShape& shape, const PlanOptions& options, const MachineProfile& profile,
                       std::vector<std::int64_t> sizes, std::int64_t response, const FrontierRanks& ranks = {},
                       const std::function<void(std::int64_t cells)>& on_cell = {});

Json to_json(const Frontier& frontier);
std::string table_of(const Frontier& frontier);  // for users

}  // namespace espalier
