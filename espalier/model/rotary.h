// Rotary position tables: cos and sin of position * inv_freq, one row per position.
//
//   inv_freq_i = theta^(-2i/D), rescaled for Llama 3.x as its config says;  table_pi = cos or sin (p inv_freq_i)
// Shapes: N positions, D head size. float64 models compute everything in float64; others follow Hugging Face (float32).
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/ops/rotation.h"
#include "espalier/plan/model_shape.h"

namespace espalier {

// In the host's memory.
RotaryTables make_rotary_tables(const ModelShape& shape, std::int64_t positions, at::ScalarType accumulator);

}  // namespace espalier
