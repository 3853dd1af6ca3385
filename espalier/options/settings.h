// Settings as they were given: a name, a value, and where it stands; and TRL's names turned into Espalier's.
//
// epsilon -> clip-ratio-low (and -high where no epsilon_high), epsilon_high -> clip-ratio-high, beta -> kl-loss-coef,
// delta -> clip-ratio-c, scale_rewards -> adv-estimator, loss_type -> loss-agg-mode (and policy-loss for cispo, sapo).
// Source of TRL's meanings: trl 1.9, GRPOConfig and GRPOTrainer.
#pragma once

#include <string>
#include <vector>

#include "espalier/options/options.h"

namespace espalier {

struct OptionSetting {
  std::string name;  // with '-' or '_', no leading dashes
  std::string value;
  std::string where;  // "run.toml:3: ", empty for the command line
};

bool is_alias(std::string_view name);  // one of TRL's names above
std::vector<std::string> alias_names();

// Applies the settings of one source in order. TRL's names are turned into Espalier's first, so that within one source
// Espalier's own names win; one sentence for each is added to `notes`. Errors: OptionError; UnsupportedError for a
// value of TRL that has no counterpart.
void apply_settings(Options& options, const std::vector<OptionSetting>& settings, std::vector<std::string>& notes);

// The rows an alias may set, for deciding which verbs take it.
std::vector<std::string> alias_targets(std::string_view name);

}  // namespace espalier
