// The machine that a plan is for, where it is not the one at hand: a GPU known by name, or a profile in a file.
#pragma once

#include <string>

#include "espalier/forecast/cost_model.h"

namespace espalier {

// `machine`: h100, h200 or a100, with rates from published figures (docs/machines.md), attention's in bfloat16 that of
// the kernels of `attention`; or a profile in JSON, or in TOML where the name ends in .toml, as to_json(MachineProfile)
// writes it, whose rate of attention is that of the kernels that were measured. Errors: OptionError for a name that is
// neither, for a profile of another dtype, and for cudnn on what is no Hopper; InputError for a file that is no
// profile.
MachineProfile planned_machine(const std::string& machine, DType dtype,
                               Choice<AttentionKernels> attention = AttentionKernels::automatic);

}  // namespace espalier
