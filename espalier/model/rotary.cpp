#include "espalier/model/rotary.h"

#include <ATen/ATen.h>

#include <numbers>

namespace espalier {
namespace {

// Llama 3.x: long wavelengths are divided by `factor`, short ones kept, those between blended.
at::Tensor rescale(const at::Tensor& inv_freq, const RopeScaling& scaling) {
  const double context = static_cast<double>(scaling.original_max_position_embeddings);
  const at::Tensor wavelength = 2 * std::numbers::pi / inv_freq;
  const at::Tensor slowed = inv_freq / scaling.factor;
  const at::Tensor blend =
      (context / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor);
  const at::Tensor between = (1 - blend) * slowed + blend * inv_freq;
  at::Tensor out = at::where(wavelength > context / scaling.low_freq_factor, slowed, inv_freq);
  const at::Tensor is_between =
      (wavelength >= context / scaling.high_freq_factor).logical_and(wavelength <= context / scaling.low_freq_factor);
  return at::where(is_between, between, out);
}

}  // namespace

RotaryTables make_rotary_tables(const ModelShape& shape, std::int64_t positions, at::ScalarType accumulator) {
  const auto options = at::TensorOptions().dtype(accumulator);
  const at::Tensor exponent = at::arange(0, shape.head_dim, 2, options) / static_cast<double>(shape.head_dim);
  at::Tensor inv_freq = at::pow(shape.rope_theta, exponent).reciprocal();
  if (shape.has_rope_scaling) inv_freq = rescale(inv_freq, shape.rope_scaling);
  const at::Tensor angle = at::outer(at::arange(positions, options), inv_freq);
  return {angle.cos(), angle.sin()};
}

}  // namespace espalier
