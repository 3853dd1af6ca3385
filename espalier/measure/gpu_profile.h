// Profiles of GPUs as `selftest` measured them, one for each GPU's name, dtype and attention kernels; they lie beside
// the CPU's (machine.h). Nothing else measures a GPU: a step on one must not wait for it.
#pragma once

#include <optional>
#include <string>

#include "espalier/base/dtype.h"
#include "espalier/device/cuda_library.h"
#include "espalier/forecast/cost_model.h"
#include "espalier/options/options.h"

namespace espalier {

// False where it cannot be kept.
bool keep_gpu_profile(const MachineProfile& profile, const OpenedGpu& gpu);

// The profile for the GPU and kernels of this run: the stored one; else the published rates of an H100, H200 or A100 if
// the GPU's name says that it is one; else the rates of an H100.
MachineProfile gpu_profile(const OpenedGpu& gpu, DType dtype);

// The kept one, if it can be read.
std::optional<MachineProfile> kept_gpu_profile(const OpenedGpu& gpu, DType dtype);

// Among kernels whose profiles in bfloat16 are kept, those with the highest rate of attention; automatic unless at
// least two can be compared.
AttentionKernels fastest_attention(const std::string& gpu);

}  // namespace espalier
