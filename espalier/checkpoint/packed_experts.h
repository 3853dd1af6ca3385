// Experts as gpt-oss stores them: the experts of a layer in one tensor, columns of gate and up in turn, or in MXFP4.
//
//   experts.gate_up_proj       [E, M, 2 F]    column 2 f is row f of gate, column 2 f + 1 row f of up
//   experts.gate_up_proj_bias  [E, 2 F]
//   experts.down_proj          [E, F, M]
//   experts.down_proj_bias     [E, M]
// MXFP4: in place of a matrix <name>_blocks [E, N, K/32, 16], 32 numbers of 4 bits each, the low one of a byte first,
// and <name>_scales [E, N, K/32], exponents of 2 with 127 added, of the matrix with N outputs and K inputs
// (gate_up_proj: N = 2 F, K = M). A number is +-0, 0.5, 1, 1.5, 2, 3, 4 or 6 (OCP Microscaling Formats, version 1.0),
// times 2^exponent: bfloat16 holds it exactly.
//
// In memory each expert has its own matrices, [outputs, inputs], with the names of the parameter table
// (shape/parameter_shapes.h): experts.3.gate_proj.weight.
#pragma once

#include <list>
#include <map>
#include <string>

#include "espalier/checkpoint/safetensors.h"

namespace espalier {

// Replaces packed tensors by their parts, which `parts` keeps; values are unpacked when read. Other tensors do not
// change.
void split_packed_experts(std::map<std::string, const SafetensorsEntry*>& tensors, std::list<SafetensorsEntry>& parts);

}  // namespace espalier
