#include "espalier/mixers/attention/work.h"

#include <algorithm>

#include "espalier/mixers/attention/library_work.h"
#include "espalier/model/sharded_buffers.h"
#include "espalier/program/step_kind.h"

namespace espalier {
namespace {

constexpr Element kActivation = Element::activation, kAccumulator = Element::accumulator;

// Measured (bench/memory_sweep.py): attention takes more where rows see a path.
constexpr std::int64_t kMostBytes = 3 << 20, kMostPathBytes = 17 << 18,
                       kNumbers = 12;  // for an element of a query

// Queries, keys and values are rotated or copied, read and written; results are written.
constexpr int kCalls = 8;

}  // namespace

AttentionSaved::AttentionSaved(const AttentionShape& s, const BlockShape& b, const BlockRows& rows)
    : BufferList(b.bytes) {
  const std::int64_t R = rows.continuing;
  if (s.has_keys()) kv_TW = add("keys and values", rows.all, s.key_value_width());
  q_RW = add("queries", R, s.projected_width());
  attended_RW = add("attended values", R, s.query_width());
  lse_HR = add("log-sum-exp of attention", s.heads, R, kAccumulator);
}

AttentionForwardBuffers::AttentionForwardBuffers(const AttentionShape& s, const BlockShape& b, const BlockRows& rows,
                                                 std::int64_t output_bytes)
    : BufferList(b.bytes) {
  const std::int64_t T = rows.all, R = rows.continuing, M = b.shape.hidden;
  const ProductBits& adapted = b.layer.adapted_alike;
  if (b.layer.has_norms_before()) normed_TM = add("normalised rows", T, M, kActivation, Stage::projection);
  if (rows.narrow) query_input_RM = add("normalised output rows", R, M, kActivation, Stage::projection);
  rotated_q_RW = add("rotated queries", R, s.query_width(), kActivation, Stage::attention);
  const bool has_keys = s.has_keys(), own = has_keys && !rows.in_path;
  if (own) rotated_k_TW = add("rotated keys", T, s.key_width(), kActivation, Stage::attention);
  if (has_keys && s.value_norm)
    unit_D = add("zeros of the norm", s.head_dim, Buffer::kVector, kActivation, Stage::attention);
  if (own && s.value_norm) normed_v_TW = add("normalised values", T, s.key_width(), kActivation, Stage::attention);
  if (s.output_gate) {
    query_RW = add("queries without gates", R, s.query_width(), kActivation, Stage::attention);
    gated_RW = add("gated values", R, s.query_width(), kActivation, Stage::output);
  }
  if (has_keys && adapted.of_mixer(Attention::key_value)) nest(Stage::projection, low_rank_bytes(b, T));
  if (adapted.of_mixer(Attention::query)) nest(Stage::projection, low_rank_bytes(b, R));
  nest(Stage::output, output_bytes);
  if (rows.ranks > 1)
    nest(Stage::attention, ShardedForwardBuffers(b, RowShares(T * rows.ranks, rows.ranks), true).peak());
}

AttentionBackwardBuffers::AttentionBackwardBuffers(const AttentionShape& s, const BlockShape& b, const BlockRows& rows,
                                                   Mixer::BlockBytes of_block)
    : BufferList(b.bytes) {
  const std::int64_t T = rows.all, R = rows.continuing, M = b.shape.hidden, Q = s.query_width(), K = s.key_width();
  const ProductBits& adapted = b.layer.adapted_alike;
  const bool has_keys = s.has_keys(), own = has_keys && !rows.in_path;
  grad_attended_RW = add("gradient of attended values", R, Q, kActivation, Stage::mlp, Stage::input);
  nest(Stage::mlp, of_block.mlp);
  if (s.output_gate) gated_RW = add("gated values", R, Q, kActivation, Stage::output);
  nest(Stage::output, of_block.output);
  grad_q_RW = add("gradient of queries", R, s.projected_width(), kActivation, Stage::attention, Stage::input);
  if (has_keys)
    grad_kv_TW =
        add("gradient of keys and values", T, s.key_value_width(), kActivation, Stage::attention, Stage::input);
  if (has_keys && s.keys_as_values) grad_value_TW = add("gradient of values", T, K, kActivation, Stage::attention);
  rotated_q_RW = add("rotated queries", R, Q, kActivation, Stage::attention);
  if (own) rotated_k_TW = add("rotated keys", T, K, kActivation, Stage::attention);
  if (has_keys && s.value_norm)
    unit_D = add("zeros of the norm", s.head_dim, Buffer::kVector, kActivation, Stage::attention);
  if (own && s.value_norm) normed_v_TW = add("normalised values", T, K, kActivation, Stage::attention);
  grad_rotated_q_RW = add("gradient of rotated queries", R, Q, kActivation, Stage::attention);
  if (s.output_gate) query_RW = add("queries without gates", R, Q, kActivation, Stage::attention);
  if (s.output_gate) grad_query_RW = rotated_q_RW;  // which attention's backward has read by then
  if (own) grad_k_TW = add("gradient of rotated keys", T, K, kAccumulator, Stage::attention);
  if (own) grad_v_TW = add("gradient of values", T, K, kAccumulator, Stage::attention);
  normed_TM = add("normalised rows", T, M, kActivation, Stage::key_value, Stage::input);
  if (has_keys)
    kv_product = add_product(*this, b, "product for keys and values", s.key_value_width(), M, Stage::key_value);
  if (R > 0 && rows.narrow) query_input_RM = add("normalised output rows", R, M, kActivation, Stage::query);
  if (R > 0) query_product = add_product(*this, b, "product for queries", s.projected_width(), M, Stage::query);
  if (R > 0 && rows.narrow) query_part_RM = add("gradient of normalised outputs", R, M, kActivation, Stage::input);
  for (const Stage stage : {Stage::key_value, Stage::input})
    if (has_keys && adapted.of_mixer(Attention::key_value)) nest(stage, low_rank_bytes(b, T));
  for (const Stage stage : {Stage::query, Stage::input})
    if (adapted.of_mixer(Attention::query)) nest(stage, low_rank_bytes(b, R));
  if (rows.ranks > 1)
    nest(Stage::attention, ShardedBackwardBuffers(b, RowShares(T * rows.ranks, rows.ranks), true).peak());
}

std::int64_t Attention::saved_bytes(const BlockShape& block, const BlockRows& rows) const {
  return AttentionSaved(shape, block, rows).peak();
}
std::int64_t Attention::forward_bytes(const BlockShape& block, const BlockRows& rows, BlockBytes of_block) const {
  return AttentionForwardBuffers(shape, block, rows, of_block.output).peak();
}
std::int64_t Attention::backward_bytes(const BlockShape& block, const BlockRows& rows, BlockBytes of_block) const {
  return AttentionBackwardBuffers(shape, block, rows, of_block).peak();
}

// q k and A v of a visible pair; five products for these two in a backward.
MixerFlops Attention::flops() const {
  return {.pair = 4.0 * static_cast<double>(shape.query_width()), .pair_backward = 2.5};
}

MixerTraffic Attention::traffic() const {
  return {2.0 * static_cast<double>(shape.query_width() + 2 * shape.key_width()), kCalls};
}

std::int64_t Attention::widest_row() const { return std::max(shape.query_width(), shape.key_value_width()); }

std::int64_t cpu_attention_bytes(std::int64_t query_width, const ScratchRows& rows) {
  return rows.threads * std::min(rows.path_rows > 0 ? kMostPathBytes : kMostBytes,
                                 rows.rows * query_width * kNumbers * element_bytes(rows.dtype).accumulator);
}

std::int64_t Attention::cpu_scratch(const ScratchRows& rows) const {
  return cpu_attention_bytes(shape.query_width(), rows);
}

std::optional<AttentionHeads> Attention::attended() const {
  return AttentionHeads{.heads = shape.heads,
                        .kv_heads = shape.kv_heads,
                        .head_dim = shape.head_dim,
                        .value_dim = shape.head_dim,
                        .window = shape.window,
                        .soft_cap = shape.soft_cap};
}

GpuScratch Attention::gpu_scratch(const ScratchRows& rows) const {
  return {own_attention_bytes(*attended(), rows), library_attention_bytes(*attended(), rows)};
}

}  // namespace espalier
