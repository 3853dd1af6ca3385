// --objective in combination with the options of policy losses.
#pragma once

#include "espalier/options/options.h"

namespace espalier {

// Rules between --objective and other options, before settle_objective. Errors: OptionError; UnsupportedError.
void check_objective_kind(const Options& options);

// sft and dpo train by a loss that is linear in the log-probs, -sum A log p: its advantages are 1 (sft), or come from
// the pairs (objective/pair_loss.h). Sets the policy loss, and for dpo the aggregation, that give this sum. Applied
// twice it changes nothing.
void settle_objective(Options& options);

}  // namespace espalier
