// The seconds of a step by parts (--profile), and the rate of its matrix products.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "espalier/forecast/cost_model.h"
#include "espalier/metrics/timer.h"
#include "espalier/parallel/traffic_log.h"
#include "espalier/program/step_plan.h"

namespace espalier {

// The collectives of a step on one rank, and its last backward, during which the summing of gradients begins. Times are
// in Timer::steady_seconds.
struct StepTraffic {
  double began = 0;  // the step
  TrafficLog events;
  double last_backward_began = 0, last_backward_ended = 0;  // 0: none

  struct OfAxis {
    std::string_view axis;
    std::int64_t calls = 0, bytes = 0;  // bytes that this rank gave
    double seconds = 0, hidden = 0;     // sums over calls, which may overlap; hidden: beside the rank's own work
  };
  std::vector<OfAxis> by_axis() const;  // in the order of their first calls
};

// Seconds by parts that never overlap and add up to the step; the last one is "other", the time of no part.
struct StepProfile {
  std::vector<std::pair<std::string, double>> seconds;
  double read = 0;                       // seconds of reading the rollouts before the first step; 0 in later steps
  double product_flops_per_second = 0;   // of the layers' matrix products; 0: none
  double measured_flops_per_second = 0;  // the highest rate of a matrix product in the machine profile
  StepTraffic collectives = {};          // without events if there is one rank

  double product_rate_share() const {  // of the measured rate; 0: there is none
    return measured_flops_per_second > 0 ? product_flops_per_second / measured_flops_per_second : 0;
  }
};

// The profile of one rank's step of `total` seconds, from the parts of its timer, without `read` and `collectives`.
StepProfile profile_of(const Timer& timer, double total, const StepPlan& plan, const LocalShape& rank, StepKind kind,
                       const MachineProfile& machine);

}  // namespace espalier
