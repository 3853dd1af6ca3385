// Values of one number format in another.
#pragma once

#include <cstdint>

#include "espalier/checkpoint/safetensors.h"

namespace espalier {

// True for the formats that convert_values reads: F64, F32, F16, BF16.
bool is_floating(TensorType type);

// to_i = from_i for i < count, rounded to nearest, ties to even, where `to` is narrower; float64 becomes bfloat16 by
// way of float32, as in torch. Equal formats are copied bit for bit. Neither pointer needs to be aligned.
void convert_values(TensorType from_type, const void* from, DType to_type, void* to, std::int64_t count);

}  // namespace espalier
