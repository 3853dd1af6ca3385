// --layout auto: for a number of processes, the degrees that fit memory and have the least predicted time.
#pragma once

#include <string>
#include <vector>

#include "espalier/plan/rank_layout.h"

namespace espalier {

// Axes that may have more than one rank. tp stays within a machine.
struct SearchedAxes {
  bool tp = true, cp = true, pp = true, dp = true, ep = true;
};

struct TriedLayout {
  Degrees degrees;
  double seconds = 0;           // 0 if weights and state alone do not fit
  std::int64_t peak_bytes = 0;  // maximum over ranks
  bool fits = false;
};

struct FoundLayout {
  LayoutPlan best;                 // on all ranks
  std::vector<TriedLayout> tried;  // the best first
  std::string reason;              // for users
};

// Plans the busiest rank of dp under every combination of degrees for `ranks` that divides the model, then all ranks
// under the best. If none fits, the best is the one that needs the least memory. Errors: OptionError if no combination
// divides the model.
FoundLayout find_layout(const LayoutProblem& problem, std::int64_t ranks, const SearchedAxes& axes = {});

Json to_json(const TriedLayout& tried);

}  // namespace espalier
