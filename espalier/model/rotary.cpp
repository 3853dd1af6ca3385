#include "espalier/model/rotary.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <type_traits>

#include "espalier/device/host_values.h"

namespace espalier {
namespace {

// x_i = function(x_i) by the C library in double, rounded once: ATen's pow, cos and sin have other bits under other
// instruction sets.
template <class Function>
at::Tensor replaced(const at::Tensor& x, Function function) {
  const auto replace = [&](const auto values) {
    at::parallel_for(0, x.numel(), 1 << 12, [&](std::int64_t begin, std::int64_t end) {
      for (auto& value : values.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin)))
        value = static_cast<std::remove_cvref_t<decltype(value)>>(function(static_cast<double>(value)));
    });
  };
  x.scalar_type() == at::kDouble ? replace(host_values<double>(x)) : replace(host_values<float>(x));
  return x;
}

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

// Channel at which a frequency turns so many times in the original context.
double channel_of(double turns, double dim, double theta, const RopeScaling& scaling) {
  const auto context = static_cast<double>(scaling.original_max_position_embeddings);
  return dim * std::log(context / (turns * 2 * std::numbers::pi)) / (2 * std::log(theta));
}

at::Tensor blend(const at::Tensor& inv_freq, const Rope& rope) {
  const RopeScaling& scaling = rope.scaling;
  const auto dim = static_cast<double>(2 * inv_freq.size(0));
  double low = channel_of(scaling.beta_fast, dim, rope.theta, scaling),
         high = channel_of(scaling.beta_slow, dim, rope.theta, scaling);
  if (scaling.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0), high = std::min(high, dim - 1);
  if (low == high) high += 0.001;
  const at::Tensor ramp = ((at::arange(inv_freq.size(0), inv_freq.options()) - low) / (high - low)).clamp(0, 1);
  return inv_freq / scaling.factor * ramp + inv_freq * (1 - ramp);
}

at::Tensor scaled(const at::Tensor& inv_freq, const Rope& rope, std::int64_t positions) {
  const RopeScaling& scaling = rope.scaling;
  switch (scaling.type) {
    case RopeType::llama3:
      return rescale(inv_freq, scaling);
    case RopeType::linear:
      return inv_freq / scaling.factor;
    case RopeType::yarn:
      return blend(inv_freq, rope);
    case RopeType::longrope:
      return inv_freq /
             at::tensor(scaling.is_long(positions) ? scaling.long_factor : scaling.short_factor, inv_freq.options());
    case RopeType::proportional: {
      const std::int64_t pairs = inv_freq.size(0);
      const auto turning = static_cast<std::int64_t>(scaling.turning * static_cast<double>(pairs));
      return at::where(at::arange(pairs) < turning, inv_freq / scaling.factor, 0);
    }
  }
  return inv_freq;
}

}  // namespace

RotaryTables make_rotary_tables(const Rope& rope, std::int64_t rotary_dim, std::int64_t positions,
                                at::ScalarType accumulator) {
  const auto options = at::TensorOptions().dtype(accumulator);
  const at::Tensor exponent = at::arange(0, rotary_dim, 2, options) / static_cast<double>(rotary_dim);
  at::Tensor inv_freq = replaced(exponent, [&](double x) { return std::pow(rope.theta, x); }).reciprocal();
  if (rope.has_scaling) inv_freq = scaled(inv_freq, rope, positions);
  const auto angles = [&] { return at::outer(at::arange(positions, options), inv_freq); };
  const at::Tensor cosines = replaced(angles(), [](double x) { return std::cos(x); }),
                   sines = replaced(angles(), [](double x) { return std::sin(x); });
  const double factor = rope.has_scaling ? rope.scaling.attention_factor : 1;
  if (factor == 1) return {cosines, sines};
  return {cosines * factor, sines * factor};
}

RotaryTables growing_tables(const RotaryTables& tables, double growth, std::int64_t length) {
  const at::Tensor position = at::arange(tables.positions(), tables.cos.options());
  const at::Tensor factor = (1 + growth * (1 + (position / static_cast<double>(length)).floor()).log()).unsqueeze(1);
  return {tables.cos * factor, tables.sin * factor};
}

}  // namespace espalier
