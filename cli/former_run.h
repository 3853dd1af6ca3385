// Options of the run that train continues, so that `train --resume DIR` needs no option twice.
#pragma once

#include <string>
#include <vector>

#include "espalier/options/options.h"
#include "espalier/settings/settings.h"

namespace espalier::cli {

// Sets in `options` what decides the numbers of the run that wrote `directory` (objective, critic, optimizer,
// mini-batches, schedule, dtype, seed), from directory/espalier/state.json; paths, --steps, --threads and the like stay
// as they are. Options of this run are applied afterwards and win. A checkpoint that is not there is left to the
// trainer to refuse. Errors: InputError or OptionError for a damaged file.
void apply_former_run(Options& options, const std::string& directory);

// "--lr 0.0001 --epochs 2": what a former run gave to `options` that is not the default. Empty where there is none.
std::string told_by_former_run(const Options& options);

// The command that goes on where `verb` was interrupted, given what it was told: what the former run recorded need not
// be said again.
std::string continuing_command(char verb, const std::vector<OptionSetting>& told, const std::string& config,
                               const std::string& directory);

}  // namespace espalier::cli
