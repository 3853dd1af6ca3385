// --layout auto: the degrees of so many processes that take least predicted time and fit.
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
  double seconds = 0;           // 0 where weights and state alone do not fit
  std::int64_t peak_bytes = 0;  // of the rank with most
  bool fits = false;
};

struct FoundLayout {
  LayoutPlan best;                 // on all ranks
  std::vector<TriedLayout> tried;  // the best first
  std::string reason;              // for a person
};

// Every way to divide `ranks` that divides the model; each is planned for its busiest rank. Where none fits, the one
// that needs least. Errors: OptionError where no way divides the model.
FoundLayout find_layout(const LayoutProblem& problem, std::int64_t ranks, const SearchedAxes& axes = {});

Json to_json(const TriedLayout& tried);

}  // namespace espalier
