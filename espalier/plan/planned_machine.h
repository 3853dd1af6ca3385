// The machine that a plan is for, where it is not the one at hand: a GPU known by name, or a profile in a file.
#pragma once

#include <string>

#include "espalier/plan/cost_model.h"

namespace espalier {

// `machine`: h100, h200 or a100, with rates from published figures (docs/machines.md), or a profile in JSON, or in TOML
// where the name ends in .toml, as to_json(MachineProfile) writes it. Errors: OptionError for a name that is neither,
// and for a profile of another dtype; InputError for a file that is no profile.
MachineProfile planned_machine(const std::string& machine, DType dtype);

}  // namespace espalier
