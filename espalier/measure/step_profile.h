// Where the seconds of a step went (--profile), and how fast its matrix products were.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "espalier/forecast/cost_model.h"
#include "espalier/observe/timer.h"
#include "espalier/parallel/traffic_log.h"
#include "espalier/program/step_plan.h"

namespace espalier {

// The collectives of a step on one rank, and its last backward, from which on gradients are summed; seconds since the
// step began.
struct StepTraffic {
  double began = 0;                                         // of the step, Timer::steady_seconds
  TrafficLog events;                                        // as they were entered
  double last_backward_began = 0, last_backward_ended = 0;  // Timer::steady_seconds; 0: none

  struct OfAxis {
    std::string_view axis;
    std::int64_t calls = 0, bytes = 0;
    double seconds = 0, hidden = 0;  // of calls, which may overlap; beside the rank's own work
  };
  std::vector<OfAxis> by_axis() const;  // in the order of their first calls
};

// Parts that never overlap and add up to the step; what no part claims is "other".
struct StepProfile {
  std::vector<std::pair<std::string, double>> seconds;
  double read = 0;                       // seconds of reading the rollouts, before the first step; 0 in later ones
  double product_flops_per_second = 0;   // of the layers' matrix products
  double measured_flops_per_second = 0;  // of the best matrix product that the machine's profile knows
  StepTraffic collectives = {};          // of several ranks

  double product_rate_share() const {
    return measured_flops_per_second > 0 ? product_flops_per_second / measured_flops_per_second : 0;
  }
};

// The profile of a step of one rank that took `total` seconds, from the parts that its timer booked.
StepProfile profile_of(const Timer& timer, double total, const StepPlan& plan, const LocalShape& rank, StepKind kind,
                       const MachineProfile& machine);

}  // namespace espalier
