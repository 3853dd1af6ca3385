// Matrices that files hold in FP8 (base/fp8.h), each as two tensors:
//
//   <name>.weight              F8_E4M3 [N, K]
//   <name>.weight_scale_inv    [ceil(N / block rows), ceil(K / block columns)]; one number, [N] or [N, 1] where rows
//   have
//                              one scale. Also named weight_scale. F32, BF16, F16; or F8_E8M0 or U8, exponents of 2
//                              with 127 added (ue8m0)
// Both names mean a factor: w = value(code) scale. Scales of activations and of keys and values (input_scale,
// activation_scale, k_scale, v_scale) are not read: activations are not rounded here.
//
// They are read as one tensor <name>.weight of float32: value(code) scale, which is rounded once to the run's dtype.
#pragma once

#include <list>
#include <map>
#include <optional>
#include <string>

#include "espalier/checkpoint/safetensors.h"
#include "espalier/shape/model_shape.h"

namespace espalier {

// Replaces such tensors by one each, which `parts` keeps; its values are made when they are read. `stored`: what
// config.json says. Errors: InputError for scales that are missing, too many, of another shape, or not finite, and for
// matrices in FP8 that config.json does not mention; UnsupportedError for e5m2 and for tensors that are no matrices;
// all with `where` and the tensor's name.
void join_fp8_tensors(std::map<std::string, const SafetensorsEntry*>& tensors, std::list<SafetensorsEntry>& parts,
                      const std::optional<StoredQuantised>& stored, const std::string& where);

// True for an entry that was joined so, whose float32 values stand for a model in bfloat16.
bool is_fp8(const SafetensorsEntry& entry);

// The same tensor in bfloat16.
SafetensorsEntry in_bfloat16(const SafetensorsEntry& joined);

}  // namespace espalier
