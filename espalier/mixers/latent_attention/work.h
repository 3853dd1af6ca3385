// Buffers of latent attention (device/buffers.h).
//
// T rows, R rows with a query (those that continue), H heads, C width of a latent, M width. With rows of a set sharded
// over cp the source takes the rows' latents, and computes keys and values from all ranks' latents: `gives`.
#pragma once

#include "espalier/mixers/latent_attention/shape.h"
#include "espalier/model/block_buffers.h"

namespace espalier {

struct LatentSavedBuffers : BufferList {
  LatentSavedBuffers(const LatentShape& shape, const BlockShape& block, const BlockRows& rows);
  // Latents before their norm; the row that all keys share is rotated.
  Place query_latent_RC, query_latent_rstd_R, latent_TC, latent_rstd_T, rotary_key_TK;
  Place kv_TW, q_RW, attended_RW, lse_HR;
};

struct LatentForwardBuffers : BufferList {
  enum class Stage { projection, attention, output };
  LatentForwardBuffers(const LatentShape& shape, const BlockShape& block, const BlockRows& rows,
                       std::int64_t output_bytes);
  Place normed_TM, query_input_RM;   // the latter if the block is narrow
  Place query_latent_RC, latent_TC;  // normed
  Place rotated_q_RW, rotated_k_TW, value_TW;
};

struct LatentBackwardBuffers : BufferList {
  enum class Stage { mlp, output, attention, key_value, query, input };
  LatentBackwardBuffers(const LatentShape& shape, const BlockShape& block, const BlockRows& rows,
                        Mixer::BlockBytes of_block);
  Place grad_attended_RW, grad_q_RW, grad_kv_TW;
  Place rotated_q_RW, rotated_k_TW, value_TW, grad_rotated_q_RW, grad_k_TW, grad_v_TW;
  Place grad_rotary_key_sum_TK, grad_rotary_key_TK;
  Place normed_TM, kv_product, query_input_RM, query_product;
  Place query_part_RM;  // where the block is narrow
  // Latents after their norm are overwritten with the gradients of the norm's result.
  Place grad_latent_TC, latent_TC, latent_product;  // the latter also for the shared key
  Place grad_normed_latent_TC;                      // where the rows give latents to other ranks
  Place grad_query_latent_RC, query_latent_RC, query_latent_product;
};

}  // namespace espalier
