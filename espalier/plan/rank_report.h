// What one process of a parallel layout would hold and do, from a plan made for one process.
//
// Simple shares, for layouts no machine at hand could hold: tp divides heads, inner widths and vocabulary (key/value
// heads fewer than tp are replicated); pp divides layers; ep divides experts' weights; cp divides every set's rows;
// dp deals top-level items (whole trees; waves that hold several) by predicted time, longest first. Communication is
// not in the seconds. Every stage is charged with embedding and head, and has the plan's waves in flight one at a time.
#pragma once

#include <cstdint>
#include <string>

#include "espalier/parallel/degrees.h"
#include "espalier/plan/cost_model.h"
#include "espalier/plan/step_plan.h"

namespace espalier {

struct RankReport {
  Degrees degrees;
  std::int64_t parameters = 0;  // of one rank
  PlanCost cost;                // of the busiest rank
  double balance = 1;           // mean over busiest dp rank, by predicted time
  double bubble = 0;            // (pp - 1) / (items + pp - 1): share of a stage's time without work
};

// Errors: OptionError for degrees that do not divide the model.
RankReport rank_report(const StepPlan& plan, const ModelShape& shape, DType dtype, const Degrees& degrees,
                       const MachineProfile& profile, const StepKind& kind = {});
Json to_json(const RankReport& report);
std::string explain(const RankReport& report);

}  // namespace espalier
