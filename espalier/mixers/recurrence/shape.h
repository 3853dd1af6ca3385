// The common part of the recurrent kinds: rows pass a state on, behind a short convolution (ops/delta_rule.h). The
// folders of the kinds say how a row is projected and which parameters there are.
//
// Hk key heads of dk channels, Hv value heads of dv channels.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>

#include "espalier/mixers/states/shape.h"
#include "espalier/shape/config_members.h"

namespace espalier {

// The gated delta rule (Qwen3-Next, Qwen3.5), the same with a decay for each key channel (Kimi Linear), or Mamba-2,
// which does not read its state before it writes: all behind a short convolution (ops/delta_rule.h).
struct RecurrenceShape {
  std::int64_t key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;  // sizes of one head
  std::int64_t kernel = 0;                                                  // rows of the convolution
  // The columns of a projected row: q, k, v, z, b, a, each for all heads (Qwen3.5); or q, k, v, z by key head, then b,
  // a by key head (Qwen3-Next).
  bool by_key_head = false;
  // Mamba-2: a row is projected to z, v, k, q of all heads and one number a head; the convolution's channels are v, k,
  // q, with biases or without; the step of a row is within [least_step, largest_step].
  bool mamba = false, conv_bias = false;
  double least_step = 0, largest_step = std::numeric_limits<double>::infinity();
  // Kimi Linear: each key channel of a head has a decay of its own, z is gated by a sigmoid, and there are as many key
  // heads as value heads. The columns of a projected row are q, k, v, b, z, a. z and a are projected through a
  // latent of this width each; 0: decays are of heads.
  std::int64_t gate_latent = 0;

  bool decays_channels() const { return gate_latent > 0; }
  std::int64_t decays() const { return value_heads * (decays_channels() ? key_dim : 1); }  // columns of a
  std::int64_t channels() const { return 2 * key_heads * key_dim + value_width(); }        // of the convolution
  std::int64_t value_width() const { return value_heads * value_dim; }
  std::int64_t projected() const { return channels() + value_width() + (mamba ? 0 : value_heads) + decays(); }
  // Columns of a projected row that are products with rows, and not with latents.
  std::int64_t projected_from_rows() const { return decays_channels() ? channels() + value_heads : projected(); }
  std::int64_t matrix() const { return value_heads * key_dim * value_dim; }  // numbers of S
  std::int64_t state() const { return matrix() + (kernel - 1) * channels(); }

  // Channels of the convolution where q and k of one key head, and v of its value heads, begin.
  struct Channels {
    std::int64_t q, k, v;
  };
  Channels channels(std::int64_t key_head) const {
    const std::int64_t keys = key_heads * key_dim, key = key_head * key_dim,
                       value = key_head * (value_heads / key_heads) * value_dim;
    if (mamba) return {value_width() + keys + key, value_width() + key, value};
    return {key, keys + key, 2 * keys + value};
  }

  // Columns of a projected row where q and k of one key head, and v, z, b, a of its value heads, begin. Mamba-2 has no
  // b: `b` is `a`.
  struct Columns {
    std::int64_t q, k, v, z, b, a;
  };
  Columns columns(std::int64_t key_head) const {
    const std::int64_t each = value_heads / key_heads, width = each * value_dim, g = key_head;
    const std::int64_t keys = key_heads * key_dim, ends = channels() + value_width();
    if (mamba) {
      const std::int64_t v = value_width(), step = ends + g * each;
      return {2 * v + keys + g * key_dim, 2 * v + g * key_dim, v + g * width, g * width, step, step};
    }
    if (decays_channels()) {
      const std::int64_t z = channels() + value_heads;
      return {g * key_dim,   keys + g * key_dim,    2 * keys + g * width,
              z + g * width, channels() + g * each, z + value_width() + g * each * key_dim};
    }
    if (by_key_head) {
      const std::int64_t first = g * 2 * (key_dim + width), q = first + key_dim;
      return {first, q, q + key_dim, q + key_dim + width, ends + 2 * g * each, ends + (2 * g + 1) * each};
    }
    return {g * key_dim,     keys + g * key_dim,           2 * keys + g * width, channels() + g * width,
            ends + g * each, ends + value_heads + g * each};
  }
};

// A mixer of one of these kinds.
class Recurrence : public StateMixer {
 public:
  // The numbers of its tensors (PartParameters), in every kind.
  enum Tensors : std::size_t { conv, conv_bias, a_log, dt_bias, skip, mixed_norm };

  Recurrence(MixerKind kind, RecurrenceShape of_shape) : StateMixer(kind), shape(of_shape) {}

  std::int64_t mixed_width() const override { return shape.value_width(); }
  void require(const Degrees& degrees) const override;
  Refusal refused_on_gpu(std::int64_t number_bytes) const override;
  std::string fingerprint() const override;

  std::int64_t state() const override { return shape.state(); }
  bool fits_chunks() const override;
  Latents latents() const override {
    return shape.decays_channels() ? Latents{shape.gate_latent, shape.value_width(), shape.decays()} : Latents{};
  }
  bool gates_rows() const override { return true; }

  MixerFlops flops() const override;
  MixerTraffic traffic() const override;
  std::int64_t widest_row() const override;
  std::int64_t cpu_scratch(const ScratchRows& rows) const override;
  GpuScratch gpu_scratch(const ScratchRows& rows) const override;

  const RecurrenceShape shape;

 protected:
  RecurrenceShape part_of_shape(std::int64_t ranks) const;
};

// Bytes of shared memory that a GPU's forward takes (ops/cuda/delta_rule.h), of which every GPU has kMostStateBytes;
// and the longest convolution of its kernels.
inline constexpr std::int64_t kMostStateBytes = 96 * 1024, kLongestGpuConvolution = 8;
std::int64_t gpu_forward_bytes(std::int64_t key_dim, std::int64_t decays, std::int64_t number_bytes);

// The largest size of a config's member, and of the convolution's.
inline constexpr std::int64_t kMostSize = 1 << 20, kMostKernel = 32;

}  // namespace espalier
