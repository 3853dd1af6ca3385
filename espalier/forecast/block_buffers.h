// The buffers of every block of the engine (device/buffers.h). model/, objective/ and execute/ take them from the
// arena, and the memory model adds them up.
//
// T rows, R rows that continue past keys and values, O output rows, P path rows, H query heads, J key/value heads, D
// head size, Dv that of values, C width of a latent, M width, F inner width (of one expert in expert layers), E
// experts, k of them a row, V vocabulary. A block does not declare members that it does not need. Members are named by
// their shape; W is a width of several parts.
#pragma once

#include <array>
#include <cstdint>

#include "espalier/device/buffers.h"
#include "espalier/program/row_shares.h"
#include "espalier/shape/model_shape.h"

namespace espalier {

// Sizes common to the blocks of a run.
struct BlockShape {
  const ModelShape& shape;
  ElementBytes bytes;
  bool rounds_weight_gradients;  // a product is rounded in its own tensor before it is added (ops/products.h)

  bool has_norms_before() const { return shape.norm_place != NormPlace::after; }
  bool has_norms_after() const { return shape.norm_place != NormPlace::before; }
  // Whether half a block changes its last product before adding it to the stream.
  bool finishes_branch() const { return has_norms_after() || shape.scales.residual != 1; }
};

// The rows of one layer.
struct BlockRows {
  std::int64_t all = 0, continuing = 0;  // T, R
  bool narrow = false;                   // only output rows continue
  bool in_path = false;                  // keys, values and their gradients are in the path
  bool experts = false;
  std::int64_t ranks = 1;  // ranks of cp; each has at most these rows of a sharded trunk
  Mixer mixer = Mixer::attention;
  std::int64_t forks = 0;  // recurrent states passed between runs of the set
  bool mlp = true;         // false: the block ends with its mixer
  bool divided = false;    // a set sharded over cp, where `ranks` does not say so

  bool is_divided() const { return divided || ranks > 1; }
};

// Whether a set's rows give latents to the other ranks of cp, which compute keys and values from them.
inline bool gives_latents(const BlockShape& block, const BlockRows& rows) {
  return rows.is_divided() && block.shape.has_latents();
}

// The states that a trunk leaves for everything below it, one for each recurrent layer, and the sums of their
// gradients; N numbers each (ops/delta_rule.h).
struct StateBuffers : BufferList {
  StateBuffers(const BlockShape& block, bool with_gradients);
  Place states_LN, grad_states_LN;
};

// Widths of a row of the path: keys and values of all heads, or with latent attention its normed latent and its
// rotated shared key (model/path_latents.h).
struct PathWidths {
  std::int64_t first, second;  // J*D and J*Dv, or C and K

  std::int64_t sum() const { return first + second; }
};
PathWidths path_widths(const ModelShape& shape, bool latents);

// One layer of the path, with its accumulators.
struct PathBuffers : BufferList {
  PathBuffers(const BlockShape& block, std::int64_t rows, bool with_gradients, bool latents = false);
  Place first_PW, second_PW, grad_first_PW, grad_second_PW;
};

// For all layers of a path of latents together: a room for keys and values of the layer in use, with buffers for blocks
// of B rows.
struct PathRoomBuffers : BufferList {
  PathRoomBuffers(const BlockShape& block, std::int64_t rows, bool with_gradients);
  Place k_PW, v_PW, grad_k_PW, grad_v_PW, kv_BW;
  Place grad_latent_BC, sum_latent_BC, sum_rotary_BK;  // the sums in the accumulator dtype
};

// Buffers that an item holds from its forward to the end of its backward, besides its layers' buffers.
struct ItemBuffers : BufferList {
  ItemBuffers(const BlockShape& block, std::int64_t outputs, bool with_gradients);
  Place grad_normed_OM, final_stream_OM, normed_OM, final_rstd_O;
};

// The input of a layer, or of the final norm.
struct StreamBuffer : BufferList {
  StreamBuffer(const BlockShape& block, std::int64_t rows);
  Place stream_TM;
};

// State that a layer saves for its backward besides its input: first half of the block, then second half.
struct AttentionSavedBuffers : BufferList {
  AttentionSavedBuffers(const BlockShape& block, const BlockRows& rows);
  Place norm_rstd_T, kv_TW, q_RW, attended_RW, lse_HR, stream_mid_RM;
  Place branch_RM, branch_rstd_R;  // input of the norm after attention
  Place projected_TW, mixed_TV;    // of the delta rule, instead of keys, values, queries and attention's results
  Place gate_latents_TC;           // the latents of z and a, side by side
  // With latent attention: the latent before its norm, and the rotated row that all keys share.
  Place query_latent_RC, query_latent_rstd_R, latent_TC, latent_rstd_T, rotary_key_TK;
};

struct MlpSavedBuffers : BufferList {
  MlpSavedBuffers(const BlockShape& block, const BlockRows& rows);
  Place mlp_rstd_R, gate_up_RW;                                // gate and up with experts [R*k, 2*F]
  Place branch_RM, branch_rstd_R;                              // input of the norm after the MLP
  Place router_logits_RE, router_choice_RK, router_weight_RK;  // experts only
  // With a shared expert: its gate and up [R, 2*F]; the logit and the weight of its gate, one per row.
  Place shared_gate_up_RW, shared_logit_R1, shared_weight_R1;
};

// The peak bytes of the forward of the second half of a block.
std::int64_t mlp_forward_bytes(const BlockShape& block, const BlockRows& rows, bool with_output);

// The second half of a block. Without output (recomputation) it stops after gate_up, or before the norm behind it.
struct DenseForwardBuffers : BufferList {
  enum class Stage { up, down };
  DenseForwardBuffers(const BlockShape& block, std::int64_t rows, bool with_output);
  Place normed_RM, act_RF;
  Place branch_RM;  // the addition to the stream, if it is more than a product
};

struct DenseBackwardBuffers : BufferList {
  enum class Stage { down, up };
  DenseBackwardBuffers(const BlockShape& block, std::int64_t rows);
  Place act_RF, down_product, normed_RM, gate_up_product;
  Place grad_branch_RM;
};

// An expert's scratch covers all rows, because all rows may choose the same expert.
struct ExpertForwardBuffers : BufferList {
  enum class Stage { router, experts, shared };
  ExpertForwardBuffers(const BlockShape& block, std::int64_t rows, bool with_output);
  Place normed_RM, sum_RM, expert_rows_RM, act_RF, shared_act_RF, low_rank_Rr;
  Place wide_normed_RM, wide_router_EM;  // where logits are wider than rows (RouterKind::wide)
};

struct ExpertBackwardBuffers : BufferList {
  enum class Stage { experts, shared, router };
  ExpertBackwardBuffers(const BlockShape& block, std::int64_t rows);
  Place normed_RM, grad_weight_RK, grad_normed_sum_RM;
  Place expert_rows_RM, act_RF, grad_gate_up_RW, expert_product, low_rank_Rr;
  Place shared_act_RF, grad_shared_gate_up_RW, shared_product, grad_shared_weight_R1;
  Place grad_logits_RE, router_product, grad_shared_logit_R1, shared_gate_product;
  Place wide_normed_RM, wide_router_EM;
};

struct LayerForwardBuffers : BufferList {
  enum class Stage { projection, attention, residual, mlp };
  LayerForwardBuffers(const BlockShape& block, const BlockRows& rows, bool with_output);
  Place normed_TM, query_input_RM;   // the latter if the block is narrow
  Place query_latent_RC, latent_TC;  // normed
  Place rotated_q_RW, rotated_k_TW, query_RW;
  Place value_TW;     // with latent attention
  Place gated_RW;     // if attention has an output gate
  Place residual_RM;  // where the block is narrow
  Place branch_RM;    // as in the second half
};

struct LayerBackwardBuffers : BufferList {
  enum class Stage { mlp, output, attention, key_value, query, input };
  LayerBackwardBuffers(const BlockShape& block, const BlockRows& rows);
  Place grad_attended_RW, gated_RW, output_product, grad_branch_RM, query_RW, grad_query_RW;
  Place grad_q_RW, grad_kv_TW;
  Place rotated_q_RW, rotated_k_TW, grad_rotated_q_RW, grad_k_TW, grad_v_TW;
  Place normed_TM, kv_product, query_input_RM, query_product;
  Place query_part_RM;  // where the block is narrow
  // With latent attention. Latents after their norm are overwritten with the gradients of the norm's result.
  Place value_TW, grad_rotary_key_sum_TK, grad_rotary_key_TK;
  Place grad_latent_TC, latent_TC, latent_product;  // the latter also for the shared key
  Place grad_normed_latent_TC;                      // where the rows give latents to other ranks (gives_latents)
  Place grad_query_latent_RC, query_latent_RC, query_latent_product;
};

// The first half of a recurrent block (model/delta_layer.h), without its MLP.
struct DeltaForwardBuffers : BufferList {
  enum class Stage { projection, rows, output };
  DeltaForwardBuffers(const BlockShape& block, const BlockRows& rows);
  Place normed_TM, states_FN, gated_TV, branch_RM;
  Place gated_RV, residual_RM;  // where the block is narrow
};

struct DeltaBackwardBuffers : BufferList {
  enum class Stage { mlp, output, rows, input };
  DeltaBackwardBuffers(const BlockShape& block, const BlockRows& rows);
  Place grad_mixed_TV, grad_gated_RV, gated_TV, gated_RV, grad_branch_RM, output_product;
  Place grad_projected_TW, states_FN, grad_states_FN;
  Place normed_TM, projected_product;
  Place grad_gate_latents_TC, gate_latents_product, gate_z_product, gate_a_product;
};

// The peak bytes of a layer's forward, with attention or the delta rule.
std::int64_t layer_forward_bytes(const BlockShape& block, const BlockRows& rows, bool with_output);
std::int64_t layer_backward_bytes(const BlockShape& block, const BlockRows& rows);

// Keys and values of a set sharded over cp (model/divided_source.h): of all S rows, and the exchange buffers: for each
// rank keys of `most` rows, then values. A trunk's keys and values are in the path. With latent attention ranks
// exchange latents and shared keys instead; S' is S rounded up to whole shares, and keys and values are computed in
// blocks of B rows.
struct DividedForwardBuffers : BufferList {
  enum class Stage { exchange, expansion, attention };
  DividedForwardBuffers(const BlockShape& block, const RowShares& shares, bool in_path);
  Place k_SW, v_SW, part, whole;
  Place latent_SC, rotary_SK, kv_BW;  // S' rows
};

struct DividedBackwardBuffers : BufferList {
  enum class Stage { exchange, expansion, attention, latents, owners };
  DividedBackwardBuffers(const BlockShape& block, const RowShares& shares, bool in_path);
  Place k_SW, v_SW, part, whole;
  Place grad_k_SW, grad_v_SW, grad_part, grad_whole;
  Place latent_SC, rotary_SK, sum_latent_SC, sum_rotary_SK;  // S' rows; the sums in the accumulator dtype
  Place kv_BW;                                               // of the set's keys and values
  Place grad_kv_BW, grad_latent_BC, sum_latent_BC, sum_rotary_BK, product;
};

// Buffers of an item's backward, below the layers' own buffers.
struct DecoderBackwardBuffers : BufferList {
  DecoderBackwardBuffers(const BlockShape& block, std::int64_t rows, std::int64_t outputs);
  Place grad_stream_OM, grad_stream_TM;
};

// How a device computes the head.
struct HeadWay {
  bool ahead = false;        // the next block computes while the host reads this block's log-probs
  bool writes_sums = false;  // its products write sums (ops/products.h)
  std::int64_t rank = 0;     // of the head's adapter; 0: none
};

// The head's block of logits. If the run's dtype is narrower than its sums, hidden rows and a run of the vocabulary's
// rows are widened first; or, if products write sums, the gradient of the logits is narrowed.
struct HeadBuffers : BufferList {
  HeadBuffers(ElementBytes bytes, std::int64_t outputs, std::int64_t vocabulary, std::int64_t width,
              bool with_gradients, HeadWay way = {});
  bool widens() const { return rooms[0].hidden_BM.index >= 0; }
  bool narrows() const { return grad_logits_BV.index >= 0; }
  bool has_two() const { return rooms[1].logits_BV.index >= 0; }
  // Buffers of a block from its product until its gradient is used.
  struct Room {
    Place logits_BV, hidden_BM;
  };
  std::int64_t block_rows, vocabulary_run;  // rows with logits at once; rows of the vocabulary widened at once
  std::array<Room, 2> rooms;
  Place weight_run_NM, grad_logits_BV, grad_hidden_BM;
  // The adapter's products are those of accumulators: rows, A and B are widened where they are narrower.
  Place low_rank_Br, low_rank_hidden_BM, low_rank_a_rM, low_rank_b_Vr;
};

}  // namespace espalier
