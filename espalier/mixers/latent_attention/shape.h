// Latent attention (DeepSeek-V2, DeepSeek-V3): a row is projected to a narrow latent, and the latent's norm to heads. A
// head of queries and keys has channels without rotation, then channels that rotate. The rotated channels of keys are
// one row for all heads, projected beside the latent.
//
// H heads, each with queries, keys and values of its own; C width of a latent, N plain channels, K rotated channels, Dv
// channels of values, M width of the stream.
#pragma once

#include <cstdint>
#include <memory>

#include "espalier/shape/config_members.h"
#include "espalier/shape/mixer.h"

namespace espalier {

struct LatentShape {
  std::int64_t heads = 0;                         // H
  std::int64_t query = 0;                         // C of queries; 0: their heads are projected from the rows
  std::int64_t key_value = 0;                     // C of keys and values
  std::int64_t plain = 0, rotary = 0, value = 0;  // N, K, Dv
  double norm_eps = 1e-6;
  double scale = 0;     // of q k; 0: 1/sqrt(head_dim)
  double soft_cap = 0;  // scores become cap tanh(score / cap); 0: not
  bool qkv_bias = false, output_bias = false;
  Rope rope = {};
  bool rotates = true;
  bool interleaved = false;  // channels 2i and 2i + 1 rotate together, not i and i + rotary/2
  // As in AttentionShape.
  double query_growth = 0;
  std::int64_t growth_length = 0;

  std::int64_t head_dim() const { return plain + rotary; }
  std::int64_t query_width() const { return heads * head_dim(); }  // also that of keys
  std::int64_t value_width() const { return heads * value; }
  std::int64_t heads_width() const { return heads * (plain + value); }  // what latents give to keys and values
};

class LatentAttention final : public Mixer {
 public:
  // The numbers of its products and tensors (PartParameters).
  enum Products : std::size_t { query_latent, key_value_latent, query, key_value, output };
  enum Tensors : std::size_t { query_latent_norm, key_value_latent_norm };

  explicit LatentAttention(LatentShape of_shape) : Mixer(MixerKind::latent_attention), shape(std::move(of_shape)) {}

  PartParameters parameters(std::int64_t hidden) const override;
  std::size_t output_product() const override { return output; }
  std::int64_t mixed_width() const override { return shape.value_width(); }
  std::shared_ptr<const Mixer> part(std::int64_t ranks) const override;
  void require(const Degrees& degrees) const override;
  Refusal refused_on_gpu(std::int64_t number_bytes) const override;
  std::string fingerprint() const override;
  void report(Json& json) const override;
  std::vector<RotaryShape> rotations() const override;

  std::vector<PathKind> path_kinds(bool latents) const override;
  bool narrows_path() const override { return true; }
  std::int64_t expanded_width() const override { return shape.heads_width(); }
  bool adapts_expansion(const ProductBits& adapted) const override;

  std::optional<AttentionHeads> attended() const override;

  MixerFlops flops() const override;
  MixerTraffic traffic() const override;
  std::int64_t widest_row() const override;
  std::int64_t cpu_scratch(const ScratchRows& rows) const override;
  GpuScratch gpu_scratch(const ScratchRows& rows) const override;
  std::int64_t saved_bytes(const BlockShape& block, const BlockRows& rows) const override;
  std::int64_t forward_bytes(const BlockShape& block, const BlockRows& rows, BlockBytes of_block) const override;
  std::int64_t backward_bytes(const BlockShape& block, const BlockRows& rows, BlockBytes of_block) const override;

  const LatentShape shape;
};

// Reads the sizes of heads and latents. As the configuration classes of transformers have it, head_dim is the channels
// that rotate, and every head has keys and values of its own. `rotates`: head_dim must be that number, if it is stated.
LatentShape read_latents(const Members& config, std::int64_t heads, bool rotates);

}  // namespace espalier
