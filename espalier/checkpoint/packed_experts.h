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

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "espalier/checkpoint/safetensors.h"

namespace espalier {

// Replaces packed tensors by their parts, which `parts` keeps; values are unpacked when read. Other tensors do not
// change.
void split_packed_experts(std::map<std::string, const SafetensorsEntry*>& tensors, std::list<SafetensorsEntry>& parts);

// How a file's tensor is composed of the parameters of all experts.
enum class Packed : std::uint8_t { none, gate_up, down, gate_up_bias, down_bias };
Packed packed_as(std::string_view name);

// The shape of the tensor from the number of its parts and the shape of one of them: [outputs, inputs] or [outputs].
std::vector<std::int64_t> packed_shape(Packed kind, std::int64_t parts, const std::vector<std::int64_t>& part);

// Overwrites `out` with one expert's slice: of gate (`first`) and up, or of down (`first`; `up` is not read). `part`:
// the shape of one of them.
void pack(Packed kind, const std::vector<std::int64_t>& part, std::int64_t element_bytes, const std::byte* first,
          const std::byte* up, std::byte* out);

}  // namespace espalier
