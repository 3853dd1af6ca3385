// The machine of a plan for other hardware: a GPU known by name, or a profile in a file.
#pragma once

#include <string>

#include "espalier/forecast/cost_model.h"

namespace espalier {

// `machine`: h100, h200 or a100, with rates from published figures (docs/machines.md); the bfloat16 rate of attention
// is that of the kernels chosen by `attention`. Or a profile file in JSON, or in TOML if the name ends in .toml, as
// written by to_json(MachineProfile); its rate of attention is that of the measured kernels. Errors: OptionError for an
// unknown name, for a profile of another dtype, and for cudnn on a GPU other than Hopper; InputError for a file that is
// not a profile.
MachineProfile planned_machine(const std::string& machine, DType dtype,
                               Choice<AttentionKernels> attention = AttentionKernels::automatic);

}  // namespace espalier
