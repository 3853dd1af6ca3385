// Buffers for the keys and values of a set sharded over cp (model/sharded_source.h).
#pragma once

#include "espalier/model/block_buffers.h"
#include "espalier/program/row_shares.h"

namespace espalier {

// Keys and values of a set sharded over cp (model/sharded_source.h): of all S rows, and the exchange buffers: for each
// rank keys of `most` rows, then values. A trunk's keys and values are in the path. With latent attention ranks
// exchange latents and shared keys instead; S' is S rounded up to whole shares, and keys and values are computed in
// blocks of B rows.
struct ShardedForwardBuffers : BufferList {
  enum class Stage { exchange, expansion, attention };
  ShardedForwardBuffers(const BlockShape& block, const RowShares& shares, bool in_path);
  Place k_SW, v_SW, part, whole;
  Place latent_SC, rotary_SK, kv_BW;  // S' rows
};

struct ShardedBackwardBuffers : BufferList {
  enum class Stage { exchange, expansion, attention, latents, owners };
  ShardedBackwardBuffers(const BlockShape& block, const RowShares& shares, bool in_path);
  Place k_SW, v_SW, part, whole;
  Place grad_k_SW, grad_v_SW, grad_part, grad_whole;
  Place latent_SC, rotary_SK, sum_latent_SC, sum_rotary_SK;  // S' rows; the sums in the accumulator dtype
  Place kv_BW;                                               // of the set's keys and values
  Place grad_kv_BW, grad_latent_BC, sum_latent_BC, sum_rotary_BK, product;
};

}  // namespace espalier
