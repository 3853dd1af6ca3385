// Buffers of an MLP as the second half of a block (device/buffers.h), dense or with experts.
//
// R rows, M width, F inner width (of one expert in layers of experts), E experts, k of them a row.
#pragma once

#include "espalier/model/block_buffers.h"

namespace espalier {

struct MlpSavedBuffers : BufferList {
  MlpSavedBuffers(const BlockShape& block, const BlockRows& rows);
  Place mlp_rstd_R, gate_up_RW;                                // gate and up with experts [R*k, 2*F]
  Place branch_RM, branch_rstd_R;                              // input of the norm after the MLP
  Place router_logits_RE, router_choice_RK, router_weight_RK;  // experts only
  // With a shared expert: its gate and up [R, 2*F]; the logit and the weight of its gate, one per row.
  Place shared_gate_up_RW, shared_logit_R1, shared_weight_R1;
  Place plain_weight_RK;  // weights before the factors of experts
  // Apart: what the norms behind the shared expert and behind the experts read.
  Place shared_branch_RM, shared_branch_rstd_R, expert_branch_RM, expert_branch_rstd_R;
  Place input_gate_RP, input_branch_RM, input_branch_rstd_R;  // of the layer's input
};

// The peak bytes of the forward and the backward of the second half of a block.
std::int64_t mlp_forward_bytes(const BlockShape& block, const BlockRows& rows, bool with_output);
std::int64_t mlp_backward_bytes(const BlockShape& block, const BlockRows& rows);

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

// The layer's input (model/layer_inputs.h) behind the MLP, P wide. `mlp`: bytes of the MLP's own buffers.
struct InputForwardBuffers : BufferList {
  enum class Stage { mlp, input };
  InputForwardBuffers(const BlockShape& block, const BlockRows& rows, bool with_output, std::int64_t mlp);
  Place stream_RM;  // behind the MLP, where it is nobody else's
  Place gated_RW, act_RP, added_RM;
  Place whole_TP, part_RP;  // where the block is narrow
};
struct InputBackwardBuffers : BufferList {
  InputBackwardBuffers(const BlockShape& block, const BlockRows& rows);
  Place stream_RM, gated_RW, act_RP, grad_branch_RM, grad_gate_RP;
  Place whole_TP, part_RP;
  Place gate_product, projection_product;
};

// An expert's scratch covers all rows, because all rows may choose the same expert.
struct ExpertForwardBuffers : BufferList {
  enum class Stage { router, experts, shared };
  ExpertForwardBuffers(const BlockShape& block, std::int64_t rows, bool with_output);
  Place normed_RM, sum_RM, expert_rows_RM, act_RF, shared_act_RF, low_rank_Rr;
  Place branch_RM;                       // the norms of results, where they are apart
  Place wide_normed_RM, wide_router_EM;  // where logits are wider than rows (RouterKind::wide)
};

struct ExpertBackwardBuffers : BufferList {
  enum class Stage { experts, shared, router };
  ExpertBackwardBuffers(const BlockShape& block, std::int64_t rows);
  Place normed_RM, grad_weight_RK, grad_normed_sum_RM;
  Place expert_rows_RM, act_RF, grad_gate_up_RW, expert_product, low_rank_Rr;
  Place shared_act_RF, grad_shared_gate_up_RW, shared_product, grad_shared_weight_R1;
  Place grad_logits_RE, router_product, grad_shared_logit_R1, shared_gate_product;
  Place grad_branch_RM, grad_result_RM;  // apart: of the sum of the results, and of one of them
  Place wide_normed_RM, wide_router_EM;
};

}  // namespace espalier
