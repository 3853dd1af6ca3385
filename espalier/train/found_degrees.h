// --layout auto of a run: the degrees of its processes, from its model and its rollouts.
#pragma once

#include <string>

#include "espalier/observe/progress.h"
#include "espalier/options/options.h"
#include "espalier/parallel/degrees.h"

namespace espalier {

struct FoundDegrees {
  Degrees degrees;
  std::string reason;
};

// Degrees for `processes` ranks, `local` of them here, on the mini-batch with most tokens. `verb`: its letter. Reads
// config.json and the rollouts, no weights. Errors: those of reading; OptionError where nothing divides the model.
FoundDegrees find_degrees(const Options& options, char verb, std::int64_t processes, std::int64_t local,
                          Progress& progress);

}  // namespace espalier
