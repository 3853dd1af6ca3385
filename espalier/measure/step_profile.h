// Where the seconds of a step went (--profile), and how fast its matrix products were.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "espalier/observe/timer.h"
#include "espalier/plan/cost_model.h"
#include "espalier/plan/step_plan.h"

namespace espalier {

// Parts that never overlap and add up to the step; what no part claims is "other".
struct StepProfile {
  std::vector<std::pair<std::string, double>> seconds;
  double read = 0;                       // seconds of reading the rollouts, before the first step; 0 in later ones
  double product_flops_per_second = 0;   // of the layers' matrix products
  double measured_flops_per_second = 0;  // of the best matrix product that the machine's profile knows

  double product_rate_share() const {
    return measured_flops_per_second > 0 ? product_flops_per_second / measured_flops_per_second : 0;
  }
};

// The profile of a step of one rank that took `total` seconds, from the parts that its timer booked.
StepProfile profile_of(const Timer& timer, double total, const StepPlan& plan, const LocalShape& rank, StepKind kind,
                       const MachineProfile& machine);

}  // namespace espalier
