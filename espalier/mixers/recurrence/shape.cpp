#include "espalier/mixers/recurrence/shape.h"

#include "espalier/base/error.h"
#include "espalier/parallel/degrees.h"
#include "espalier/shape/fingerprint_words.h"

namespace espalier {

RecurrenceShape Recurrence::part_of_shape(std::int64_t ranks) const {
  RecurrenceShape own = shape;
  own.key_heads /= ranks, own.value_heads /= ranks;
  return own;
}

void Recurrence::require(const Degrees& d) const {
  if (shape.key_heads % d.tp != 0)
    throw OptionError(
        {"--tp", text_of("a divisor of the ", shape.key_heads, " key heads of recurrent layers"), text_of(d.tp), ""});
}

std::int64_t gpu_forward_bytes(std::int64_t key_dim, std::int64_t decays, std::int64_t number_bytes) {
  constexpr std::int64_t kRows = 16, kColumns = 32;  // of a block
  return (kRows * (2 * key_dim + kColumns + decays + 1) + key_dim * kColumns) * number_bytes;
}

Mixer::Refusal Recurrence::refused_on_gpu(std::int64_t number_bytes) const {
  if (shape.kernel > kLongestGpuConvolution)
    return {text_of("convolutions of at most ", kLongestGpuConvolution, " rows"), text_of(shape.kernel)};
  const std::int64_t bytes =
      gpu_forward_bytes(shape.key_dim, shape.decays_channels() ? shape.key_dim : 1, number_bytes);
  if (bytes > kMostStateBytes)
    return {text_of("keys of recurrent layers for which ", kMostStateBytes, " bytes of shared memory are enough"),
            text_of(bytes, " bytes for keys of ", shape.key_dim, " with sums of ", number_bytes, " bytes")};
  return {};
}

std::string Recurrence::fingerprint() const {
  const auto& [key_heads, value_heads, key_dim, value_dim, kernel, implied_by_key_head, implied_mamba, conv_bias,
               least_step, largest_step, gate_latent] = shape;
  FingerprintWords words{std::string(name_of(kind()))};
  for (const auto& [name, value] : {std::pair{"key_heads", key_heads},
                                    {"value_heads", value_heads},
                                    {"key_dim", key_dim},
                                    {"value_dim", value_dim},
                                    {"kernel", kernel}})
    words.number(name, value);
  words.unless(0, "gate_latent", gate_latent);
  words.flag("conv_bias", conv_bias);
  words.unless(0, "least_step", least_step);
  words.unless(RecurrenceShape{}.largest_step, "largest_step", largest_step);
  return std::move(words).text();
}

}  // namespace espalier
