// --layout auto of a run: the degrees of its processes, from its model and its rollouts.
#pragma once

#include <string>

#include "espalier/metrics/progress.h"
#include "espalier/options/options.h"
#include "espalier/parallel/degrees.h"

namespace espalier {

struct FoundDegrees {
  Degrees degrees;
  std::string reason;
};

// Degrees for `processes` ranks, `local` of them on this machine, by the mini-batch with the most tokens. `verb`: the
// verb's letter; 's', score, takes all rollouts as one and runs forward only. Reads config.json and the rollouts, no
// weights. Errors: from reading; OptionError if no degrees divide the model.
FoundDegrees find_degrees(const Options& options, char verb, std::int64_t processes, std::int64_t local,
                          Progress& progress);

}  // namespace espalier
