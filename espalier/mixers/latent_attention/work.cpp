#include "espalier/mixers/latent_attention/work.h"

#include <algorithm>

#include "espalier/mixers/attention/library_work.h"
#include "espalier/mixers/attention/work.h"
#include "espalier/model/sharded_buffers.h"
#include "espalier/program/step_kind.h"

namespace espalier {
namespace {

constexpr Element kActivation = Element::activation, kAccumulator = Element::accumulator;
constexpr int kCalls = 8;

}  // namespace

LatentSavedBuffers::LatentSavedBuffers(const LatentShape& s, const BlockShape& b, const BlockRows& rows)
    : BufferList(b.bytes) {
  const std::int64_t R = rows.continuing;
  if (s.query > 0) {
    query_latent_RC = add("latents of queries", R, s.query);
    query_latent_rstd_R = add("1/rms of latents of queries", R, Buffer::kVector, kAccumulator);
  }
  latent_TC = add("latents of keys and values", rows.all, s.key_value);
  latent_rstd_T = add("1/rms of latents", rows.all, Buffer::kVector, kAccumulator);
  rotary_key_TK = add("shared keys", rows.all, s.rotary);
  if (!rows.is_sharded()) kv_TW = add("keys and values", rows.all, s.heads_width());
  q_RW = add("queries", R, s.query_width());
  attended_RW = add("attended values", R, s.value_width());
  lse_HR = add("log-sum-exp of attention", s.heads, R, kAccumulator);
}

LatentForwardBuffers::LatentForwardBuffers(const LatentShape& s, const BlockShape& b, const BlockRows& rows,
                                           std::int64_t output_bytes)
    : BufferList(b.bytes) {
  const std::int64_t T = rows.all, R = rows.continuing, M = b.shape.hidden;
  const ProductBits& adapted = b.layer.adapted_alike;
  const bool own = !rows.in_path && !rows.is_sharded();
  if (b.layer.has_norms_before()) normed_TM = add("normalised rows", T, M, kActivation, Stage::projection);
  if (rows.narrow) query_input_RM = add("normalised output rows", R, M, kActivation, Stage::projection);
  if (s.query > 0) query_latent_RC = add("normalised latents of queries", R, s.query, kActivation, Stage::projection);
  latent_TC = add("normalised latents", T, s.key_value, kActivation, Stage::projection);
  rotated_q_RW = add("rotated queries", R, s.query_width(), kActivation, Stage::attention);
  if (own) rotated_k_TW = add("rotated keys", T, s.query_width(), kActivation, Stage::attention);
  if (own) value_TW = add("values", T, s.value_width(), kActivation, Stage::attention);
  if (adapted.of_mixer(LatentAttention::key_value_latent) || adapted.of_mixer(LatentAttention::key_value))
    nest(Stage::projection, low_rank_bytes(b, T));
  if (adapted.of_mixer(LatentAttention::query_latent) || adapted.of_mixer(LatentAttention::query))
    nest(Stage::projection, low_rank_bytes(b, R));
  nest(Stage::output, output_bytes);
  if (rows.ranks > 1)
    nest(Stage::attention, ShardedForwardBuffers(b, RowShares(T * rows.ranks, rows.ranks), true).peak());
}

LatentBackwardBuffers::LatentBackwardBuffers(const LatentShape& s, const BlockShape& b, const BlockRows& rows,
                                             Mixer::BlockBytes of_block)
    : BufferList(b.bytes) {
  const std::int64_t T = rows.all, R = rows.continuing, M = b.shape.hidden, Q = s.query_width(), C = s.key_value;
  const ProductBits& adapted = b.layer.adapted_alike;
  const bool gives = rows.is_sharded(), own = !rows.in_path && !gives, query_latents = s.query > 0;
  grad_attended_RW = add("gradient of attended values", R, s.value_width(), kActivation, Stage::mlp, Stage::input);
  nest(Stage::mlp, of_block.mlp);
  nest(Stage::output, of_block.output);
  grad_q_RW = add("gradient of queries", R, Q, kActivation, Stage::attention, Stage::input);
  if (gives)
    grad_normed_latent_TC = add("gradient of normalised latents", T, C, kActivation, Stage::attention, Stage::input);
  else
    grad_kv_TW = add("gradient of keys and values", T, s.heads_width(), kActivation, Stage::attention, Stage::input);
  grad_rotary_key_TK = add("gradient of shared keys", T, s.rotary, kActivation, Stage::attention, Stage::input);
  rotated_q_RW = add("rotated queries", R, Q, kActivation, Stage::attention);
  if (own) rotated_k_TW = add("rotated keys", T, Q, kActivation, Stage::attention);
  grad_rotated_q_RW = add("gradient of rotated queries", R, Q, kActivation, Stage::attention);
  if (own) grad_k_TW = add("gradient of rotated keys", T, Q, kAccumulator, Stage::attention);
  if (own) grad_v_TW = add("gradient of values", T, s.value_width(), kAccumulator, Stage::attention);
  if (own) value_TW = add("values", T, s.value_width(), kActivation, Stage::attention);
  grad_rotary_key_sum_TK = add("sum over heads for shared keys", T, s.rotary, kAccumulator, Stage::attention);
  grad_latent_TC = add("gradient of latents", T, C, kActivation, Stage::key_value, Stage::input);
  if (query_latents)
    grad_query_latent_RC =
        add("gradient of latents of queries", R, s.query, kActivation, Stage::key_value, Stage::input);
  normed_TM = add("normalised rows", T, M, kActivation, Stage::key_value, Stage::input);
  if (!gives) kv_product = add_product(*this, b, "product for keys and values", s.heads_width(), C, Stage::key_value);
  if (!gives) latent_TC = add("normalised latents", T, C, kActivation, Stage::key_value);
  latent_product = add_product(*this, b, "product for latents", std::max(C, s.rotary), M, Stage::key_value);
  if (R > 0 && rows.narrow) query_input_RM = add("normalised output rows", R, M, kActivation, Stage::query);
  if (R > 0) query_product = add_product(*this, b, "product for queries", Q, query_latents ? s.query : M, Stage::query);
  if (R > 0 && query_latents) {
    query_latent_RC = add("normalised latents of queries", R, s.query, kActivation, Stage::query);
    query_latent_product = add_product(*this, b, "product for latents of queries", s.query, M, Stage::query);
  }
  if (R > 0 && rows.narrow) query_part_RM = add("gradient of normalised outputs", R, M, kActivation, Stage::input);
  const bool adapts_keys =
      adapted.of_mixer(LatentAttention::key_value_latent) || adapted.of_mixer(LatentAttention::key_value);
  const bool adapts_queries =
      adapted.of_mixer(LatentAttention::query_latent) || adapted.of_mixer(LatentAttention::query);
  for (const Stage stage : {Stage::key_value, Stage::input})
    if (adapts_keys) nest(stage, low_rank_bytes(b, T));
  for (const Stage stage : {Stage::query, Stage::input})
    if (adapts_queries) nest(stage, low_rank_bytes(b, R));
  if (rows.ranks > 1)
    nest(Stage::attention, ShardedBackwardBuffers(b, RowShares(T * rows.ranks, rows.ranks), true).peak());
}

std::int64_t LatentAttention::saved_bytes(const BlockShape& block, const BlockRows& rows) const {
  return LatentSavedBuffers(shape, block, rows).peak();
}
std::int64_t LatentAttention::forward_bytes(const BlockShape& block, const BlockRows& rows, BlockBytes of_block) const {
  return LatentForwardBuffers(shape, block, rows, of_block.output).peak();
}
std::int64_t LatentAttention::backward_bytes(const BlockShape& block, const BlockRows& rows,
                                             BlockBytes of_block) const {
  return LatentBackwardBuffers(shape, block, rows, of_block).peak();
}

// q k and A v of a visible pair. In a backward S, dQ and dK again over channels of keys, dA and dV over channels of
// values.
MixerFlops LatentAttention::flops() const {
  const auto keys = static_cast<double>(shape.head_dim()), values = static_cast<double>(shape.value);
  return {.pair = 2.0 * static_cast<double>(shape.query_width() + shape.value_width()),
          .pair_backward = (3 * keys + 2 * values) / (keys + values)};
}

// Rows of heads, and the norms of latents.
MixerTraffic LatentAttention::traffic() const {
  return {2.0 * static_cast<double>(2 * shape.query_width() + shape.value_width() + shape.query + shape.key_value),
          kCalls};
}

std::int64_t LatentAttention::widest_row() const { return std::max(shape.query_width(), shape.heads_width()); }

std::int64_t LatentAttention::cpu_scratch(const ScratchRows& rows) const {
  return cpu_attention_bytes(shape.query_width(), rows);
}

std::optional<AttentionHeads> LatentAttention::attended() const {
  return AttentionHeads{.heads = shape.heads,
                        .kv_heads = shape.heads,
                        .head_dim = shape.head_dim(),
                        .value_dim = shape.value,
                        .soft_cap = shape.soft_cap};
}

GpuScratch LatentAttention::gpu_scratch(const ScratchRows& rows) const {
  return {own_attention_bytes(*attended(), rows), library_attention_bytes(*attended(), rows)};
}

}  // namespace espalier
