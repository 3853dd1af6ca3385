// Bounds whose slope at the bound itself is 1, as torch's clamp had it before 2.14 and as the engine has it
// (docs/mathematics.md). Since 2.14 torch's is 0 there.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/clamp_max.h>
#include <ATen/ops/where.h>

namespace espalier {

inline at::Tensor within(const at::Tensor& x, double low, double high) {
  return at::where(x.ge(low).logical_and(x.le(high)), x, at::clamp(x.detach(), low, high));
}
inline at::Tensor at_most(const at::Tensor& x, double high) {
  return at::where(x.le(high), x, at::clamp_max(x.detach(), high));
}

}  // namespace espalier
