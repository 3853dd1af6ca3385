// Attention with keys and values of heads: windows, sinks, caps, gates and norms of heads are its members, because one
// kernel runs them all.
//
// H query heads, J key/value heads, D head size, M width of the stream.
#pragma once

#include <cstdint>
#include <memory>

#include "espalier/shape/block_kinds.h"
#include "espalier/shape/layer_shape.h"

namespace espalier {

// Names of parameters that differ among families.
struct AttentionNames {
  const char* output = "self_attn.o_proj";
  const char *query_norm = "self_attn.q_norm.weight", *key_norm = "self_attn.k_norm.weight";
};

struct AttentionShape {
  std::int64_t heads = 0, kv_heads = 0, head_dim = 0;  // H, J, D
  std::int64_t window = 0;  // a row attends to itself and the window - 1 rows above it; 0: to all rows above it
  double scale = 0;         // of q k; 0: 1/sqrt(head_dim)
  double soft_cap = 0;      // scores become cap tanh(score / cap); 0: not
  bool qkv_bias = false, output_bias = false;
  bool qk_norm = false;    // norms of the heads of queries and keys
  bool wide_norm = false;  // these are over all heads of a row, not over each head
  NormKind norm = NormKind::rms;
  double norm_eps = 1e-6;
  bool value_norm = false;      // heads of values are divided by their root mean square
  bool keys_as_values = false;  // values are the keys before norm and rotation
  // The layer whose keys and values rows attend to, without any of their own; -1: the layer has its own.
  std::int64_t source = -1;
  bool sinks = false;        // a trained logit per head joins each row's softmax; it has no value
  bool output_gate = false;  // q_proj gives query and gate [2 D] per head; attended values times sigmoid(gate)
  Rope rope = {};
  std::int64_t rotary = 0;   // the first channels of a head, which rotate
  bool interleaved = false;  // channels 2i and 2i + 1 rotate together, not i and i + rotary/2
  // Rotated queries of position p are multiplied by 1 + query_growth log(1 + floor(p / growth_length)) (Ministral 3).
  double query_growth = 0;
  std::int64_t growth_length = 0;
  const char* fused_qkv = "";  // one matrix of files: q, k, v
  const char* joint_qkv = "";  // the module of transformers that is all three
  AttentionNames names = {};

  std::int64_t query_width() const { return heads * head_dim; }
  std::int64_t projected_width() const { return (output_gate ? 2 : 1) * query_width(); }  // of the query's projection
  std::int64_t key_width() const { return kv_heads * head_dim; }
  bool has_keys() const { return source < 0; }
  // Outputs of the product for keys and values.
  std::int64_t key_value_width() const { return has_keys() ? (keys_as_values ? 1 : 2) * key_width() : 0; }
};

class Attention final : public Mixer {
 public:
  // The numbers of its products and tensors (PartParameters).
  enum Products : std::size_t { query, key_value, output };
  enum Tensors : std::size_t { query_norm, key_norm, sinks };
  // The number of the tables of values among its rotations, where values have a norm: they turn nothing.
  static constexpr std::size_t kValueTables = 1;

  explicit Attention(AttentionShape of_shape) : Mixer(MixerKind::attention), shape(std::move(of_shape)) {}

  PartParameters parameters(std::int64_t hidden) const override;
  std::size_t output_product() const override { return output; }
  std::int64_t mixed_width() const override { return shape.query_width(); }
  std::shared_ptr<const Mixer> part(std::int64_t ranks) const override;
  void require(const Degrees& degrees) const override;
  Refusal refused_on_gpu(std::int64_t number_bytes) const override;
  std::string fingerprint() const override;
  void report(Json& json) const override;
  std::vector<RotaryShape> rotations() const override;

  std::vector<PathKind> path_kinds(bool latents) const override;
  std::int64_t window() const override { return shape.window; }
  std::int64_t source() const override { return shape.source; }

  std::optional<AttentionHeads> attended() const override;

  MixerFlops flops() const override;
  MixerTraffic traffic() const override;
  std::int64_t widest_row() const override;
  std::int64_t cpu_scratch(const ScratchRows& rows) const override;
  GpuScratch gpu_scratch(const ScratchRows& rows) const override;
  std::int64_t saved_bytes(const BlockShape& block, const BlockRows& rows) const override;
  std::int64_t forward_bytes(const BlockShape& block, const BlockRows& rows, BlockBytes of_block) const override;
  std::int64_t backward_bytes(const BlockShape& block, const BlockRows& rows, BlockBytes of_block) const override;

  const AttentionShape shape;
};

// Equal layers of this attention, whose whole heads rotate, with MLPs of this kind.
std::vector<LayerShape> attention_layers(std::int64_t count, AttentionShape attention, std::int64_t inner,
                                         MlpKind mlp = MlpKind::dense);

// The limits of attention with these heads under tp. Errors: OptionError.
void require_heads(std::int64_t heads, std::int64_t kv_heads, const Degrees& degrees);
// The widest head that a GPU's kernels take, above which attention runs by products (ops/cuda/wide_attention.h); and
// the bytes of the widest row of a norm in shared memory.
inline constexpr std::int64_t kLargestGpuHead = 256, kWidestGpuNorm = 96 * 1024;
Mixer::Refusal norm_refused_on_gpu(std::int64_t width, std::int64_t number_bytes);
}  // namespace espalier
