// The one schedule: every plan, dense, packed, phased or a tree of trunks, is this recursion (docs/architecture.md).
// It says what happens in which order; an executor makes it happen. Neither model nor head knows of it.
#pragma once

#include <vector>

#include "espalier/plan/step_plan.h"

namespace espalier {

class Executor {
 public:
  virtual ~Executor() = default;

  virtual void open_trunk(const PlanItem& trunk) = 0;   // phase A: forward; keys and values can be read from now on
  virtual void run_wave(const PlanItem& wave) = 0;      // phase B: forward, objective, backward
  virtual void close_trunk(const PlanItem& trunk) = 0;  // phase C: backward, after everything below
};

// The events of the items and of everything below them, in order.
void run_schedule(const std::vector<PlanItem>& items, Executor& executor);

}  // namespace espalier
