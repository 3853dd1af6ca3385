// Buffers of attention with keys and values of heads (device/buffers.h).
//
// T rows, R rows with a query (those that continue), H query heads, J key/value heads, D head size, M width. `in_path`
// and rows of a set sharded over cp: a source keeps keys and values.
#pragma once

#include "espalier/mixers/attention/shape.h"
#include "espalier/model/block_buffers.h"

namespace espalier {

struct AttentionSaved : BufferList {
  AttentionSaved(const AttentionShape& shape, const BlockShape& block, const BlockRows& rows);
  Place kv_TW, q_RW, attended_RW, lse_HR;
};

struct AttentionForwardBuffers : BufferList {
  enum class Stage { projection, attention, output };
  AttentionForwardBuffers(const AttentionShape& shape, const BlockShape& block, const BlockRows& rows,
                          std::int64_t output_bytes);
  Place normed_TM, query_input_RM;  // the latter if the block is narrow
  Place rotated_q_RW, rotated_k_TW;
  Place normed_v_TW, unit_D;  // if heads of values have a norm
  Place query_RW, gated_RW;   // if attention has an output gate
};

struct AttentionBackwardBuffers : BufferList {
  enum class Stage { mlp, output, attention, key_value, query, input };
  AttentionBackwardBuffers(const AttentionShape& shape, const BlockShape& block, const BlockRows& rows,
                           Mixer::BlockBytes of_block);
  Place grad_attended_RW, gated_RW, query_RW, grad_query_RW;
  Place grad_q_RW, grad_kv_TW;
  Place grad_value_TW;  // where values are keys
  Place rotated_q_RW, rotated_k_TW, normed_v_TW, unit_D, grad_rotated_q_RW, grad_k_TW, grad_v_TW;
  Place normed_TM, kv_product, query_input_RM, query_product;
  Place query_part_RM;  // where the block is narrow
};

// Bytes that threads of a CPU keep for attention with queries of this width.
std::int64_t cpu_attention_bytes(std::int64_t query_width, const ScratchRows& rows);

}  // namespace espalier
