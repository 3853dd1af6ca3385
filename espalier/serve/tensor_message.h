// The Tensor message of the tinker SDK.
#pragma once

#include <cstdint>

#include "espalier/serve/losses.h"
#include "espalier/serve/wire.h"

namespace espalier::serve {

// As the wire numbers them.
enum class ElementType { none = 0, float32 = 1, int64 = 2, int32 = 3, bfloat16 = 4 };

// Tensors of one request share what is left of `numbers`. Errors: InputError for data that do not fit their shape, for
// indices out of range, and for more numbers than are left.
Tensor read_tensor(Bytes message, std::int64_t& numbers);

}  // namespace espalier::serve
