// --dry-run: everything that a verb checks before it computes, and what it would run.
#pragma once

#include "cli/verbs.h"

namespace espalier::cli {

// Reads configs, rollouts and prompts, checks them against the options, and prints what would run (train: its plan).
// Weights are not read and nothing is written. The exit code and the errors are those that the verb itself would give.
// OptionError for verbs that only read.
int dry_run(const Verb& verb, Context& context);

}  // namespace espalier::cli
