// Rotary position tables: cos and sin of position * inv_freq, one row per position.
//
//   inv_freq_i = theta^(-2i/K), rescaled as the config says;  table_pi = a cos or a sin (p inv_freq_i)
//   llama3: long wavelengths are divided by `factor`, short ones kept, those in between blended
//   linear: all are divided by `factor`
//   yarn: (1 - ramp_i) inv_freq_i + ramp_i inv_freq_i / factor, where the ramp rises from 0 at the channel that turns
//         beta_fast times in the original context to 1 at the channel that turns beta_slow times; a is the attention
//         factor
//   longrope: frequency i is divided by short_factor_i, or by long_factor_i if there are more positions than the
//         original context has; a is the attention factor. One table serves all rows of a step, so that a prompt's rows
//         are equal in all of its rollouts.
// Shapes: N positions, K channels of a head that rotate. float64 models compute everything in float64; others follow
// Hugging Face (float32). Powers, cosines and sines are computed in float64 and rounded once, so that the tables do not
// depend on the instruction set that the tensor library takes.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/ops/rotation.h"
#include "espalier/shape/rope.h"

namespace espalier {

// In host memory.
RotaryTables make_rotary_tables(const Rope& rope, std::int64_t rotary_dim, std::int64_t positions,
                                at::ScalarType accumulator);

// The tables of queries whose factor grows with the position (AttentionShape::query_growth): row p of cos and sin times
// 1 + growth log(1 + floor(p / length)).
RotaryTables growing_tables(const RotaryTables& tables, double growth, std::int64_t length);

}  // namespace espalier
