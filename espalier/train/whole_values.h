// Masters and moments that ranks hold parts of (--shard), whole again for a file: one parameter at a time, on rank 0.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/device/device.h"
#include "espalier/optimizer/adamw.h"

namespace espalier {

// Whole parameters of `part`, which is optimizer.masters() or a moment: on rank 0 of those that share the state, null
// on the others. All of them ask for the same parameters in the same order. `part` must outlive the result.
ParameterValues whole_values(const AdamW& optimizer, const at::Tensor& part, Device& device);

}  // namespace espalier
