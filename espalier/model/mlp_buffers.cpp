#include "espalier/model/mlp_buffers.h"

#include <algorithm>

#include "espalier/shape/parameter_shapes.h"

namespace espalier {
namespace {

constexpr Element kActivation = Element::activation, kAccumulator = Element::accumulator, kInt32 = Element::int32;

bool adapts(const BlockShape& b, std::size_t product) { return b.layer.adapted_alike.of_mlp(product); }
bool adapts_experts(const BlockShape& b) {
  return adapts(b, ExpertProductNumbers::gate_up) || adapts(b, ExpertProductNumbers::down);
}
bool adapts_shared(const BlockShape& b) {
  return adapts(b, ExpertProductNumbers::shared_gate_up) || adapts(b, ExpertProductNumbers::shared_down);
}

// True if router logits are wider than rows.
bool wide_router(const BlockShape& b) { return b.shape.router.wide && b.bytes.activation != b.bytes.accumulator; }

// Beside wide logits A and B are widened, too.
std::int64_t router_low_rank_bytes(const BlockShape& b, std::int64_t rows) {
  if (!wide_router(b)) return low_rank_bytes(b, rows);
  const std::int64_t r = low_rank_width(b.shape), bytes = b.bytes.accumulator;
  return arena_bytes(r * b.shape.hidden * bytes) + arena_bytes(b.shape.experts * r * bytes) +
         arena_bytes(rows * r * bytes);
}

// The same for experts and the shared expert.
template <class Stage>
BufferList::Place add_expert_low_rank(BufferList& list, const BlockShape& b, std::int64_t rows, Stage first,
                                      Stage last) {
  if (!adapts_experts(b) && !adapts_shared(b)) return {};
  return list.add("rows of low rank", rows, low_rank_width(b.shape), kActivation, first, last);
}

}  // namespace

std::int64_t mlp_forward_bytes(const BlockShape& b, const BlockRows& rows, bool with_output) {
  if (b.layer.mlp == MlpKind::none || rows.continuing == 0) return 0;
  const bool inputs = b.shape.layer_inputs.width > 0;
  const std::int64_t mlp = b.layer.has_experts()
                               ? ExpertForwardBuffers(b, rows.continuing, with_output).peak()
                               : DenseForwardBuffers(b, rows.continuing, with_output || inputs).peak();
  return inputs ? InputForwardBuffers(b, rows, with_output, mlp).peak() : mlp;
}

std::int64_t mlp_backward_bytes(const BlockShape& b, const BlockRows& rows) {
  if (b.layer.mlp == MlpKind::none || rows.continuing == 0) return 0;
  const std::int64_t mlp = b.layer.has_experts() ? ExpertBackwardBuffers(b, rows.continuing).peak()
                                                 : DenseBackwardBuffers(b, rows.continuing).peak();
  return b.shape.layer_inputs.width > 0 ? std::max(mlp, InputBackwardBuffers(b, rows).peak()) : mlp;
}

MlpSavedBuffers::MlpSavedBuffers(const BlockShape& b, const BlockRows& rows) : BufferList(b.bytes) {
  const ModelShape& s = b.shape;
  const std::int64_t R = rows.continuing, k = s.experts_per_token;
  if (b.layer.mlp == MlpKind::none) return;
  if (b.layer.has_norms_before()) mlp_rstd_R = add("1/rms before the MLP", R, Buffer::kVector, kAccumulator);
  if (const std::int64_t P = s.layer_inputs.width; P > 0) {
    input_gate_RP = add("gate of the layer's input", R, P);
    input_branch_RM = add("product of the layer's input", R, s.hidden);
    input_branch_rstd_R = add("1/rms of the input's product", R, Buffer::kVector, kAccumulator);
  }
  if (!b.layer.has_experts()) {
    gate_up_RW = add("gate and up", R, s.gate_up_width(b.layer.inner));
    if (!b.layer.has_norms_after()) return;
    branch_RM = add("output of the MLP", R, s.hidden);
    branch_rstd_R = add("1/rms of the MLP's output", R, Buffer::kVector, kAccumulator);
    return;
  }
  gate_up_RW = add("gate and up of experts", R * k, s.gate_up_width(s.expert_inner));
  router_logits_RE = add("router logits", R, s.experts, wide_router(b) ? kAccumulator : kActivation);
  router_choice_RK = add("chosen experts", R, k, kInt32);
  router_weight_RK = add("weights of experts", R, k, kAccumulator);
  if (s.router.expert_scale) plain_weight_RK = add("weights before experts' factors", R, k, kAccumulator);
  if (s.shared_expert.apart) {
    branch_RM = add("sum of both results", R, s.hidden);
    branch_rstd_R = add("1/rms of the sum of both results", R, Buffer::kVector, kAccumulator);
    shared_branch_RM = add("result of the shared expert", R, s.hidden);
    shared_branch_rstd_R = add("1/rms of the shared expert's result", R, Buffer::kVector, kAccumulator);
    expert_branch_RM = add("result of the experts", R, s.hidden);
    expert_branch_rstd_R = add("1/rms of the experts' result", R, Buffer::kVector, kAccumulator);
  }
  if (s.shared_expert.inner == 0) return;
  shared_gate_up_RW = add("gate and up of the shared expert", R, s.gate_up_width(s.shared_expert.inner));
  if (!s.shared_expert.gate) return;
  shared_logit_R1 = add("logits of the shared expert's gate", R, 1);
  shared_weight_R1 = add("weights of the shared expert", R, 1, kAccumulator);
}

DenseForwardBuffers::DenseForwardBuffers(const BlockShape& b, std::int64_t rows, bool with_output)
    : BufferList(b.bytes) {
  if (b.layer.has_norms_before()) normed_RM = add("normalised rows", rows, b.shape.hidden, kActivation, Stage::up);
  if (with_output || b.layer.has_norms_after())
    act_RF = add("activation", rows, b.layer.inner, kActivation, Stage::down);
  if (act_RF.index >= 0 && b.finishes_branch())
    branch_RM = add("addition to the stream", rows, b.shape.hidden, kActivation, Stage::down);
  if (adapts(b, DenseProductNumbers::gate_up)) nest(Stage::up, low_rank_bytes(b, rows));
  if (adapts(b, DenseProductNumbers::down) && act_RF.index >= 0) nest(Stage::down, low_rank_bytes(b, rows));
}

DenseBackwardBuffers::DenseBackwardBuffers(const BlockShape& b, std::int64_t rows) : BufferList(b.bytes) {
  const std::int64_t M = b.shape.hidden, F = b.layer.inner;
  act_RF = add("activation", rows, F, kActivation, Stage::down, Stage::up);
  down_product = add_product(*this, b, "product of down", M, F, Stage::down);
  if (b.finishes_branch()) grad_branch_RM = add("gradient of the MLP's output", rows, M, kActivation, Stage::down);
  normed_RM = add("normalised rows", rows, M, kActivation, Stage::up);
  gate_up_product = add_product(*this, b, "product for gate and up", b.shape.gate_up_width(F), M, Stage::up);
  if (adapts(b, DenseProductNumbers::gate_up)) nest(Stage::up, low_rank_bytes(b, rows));
  if (adapts(b, DenseProductNumbers::down)) nest(Stage::down, low_rank_bytes(b, rows));
}

InputForwardBuffers::InputForwardBuffers(const BlockShape& b, const BlockRows& rows, bool with_output, std::int64_t mlp)
    : BufferList(b.bytes) {
  const std::int64_t R = rows.continuing, P = b.shape.layer_inputs.width, M = b.shape.hidden;
  if (!with_output) stream_RM = add("stream behind the MLP", R, M, kActivation, Stage::mlp, Stage::input);
  nest(Stage::mlp, mlp);
  gated_RW = add("gate and input of the layer", R, 2 * P, kActivation, Stage::input);
  act_RP = add("gated input", R, P, kActivation, Stage::input);
  added_RM = add("addition of the input", R, M, kActivation, Stage::input);
  if (adapts(b, DenseProductNumbers::input_gate) || adapts(b, DenseProductNumbers::input_projection))
    nest(Stage::input, low_rank_bytes(b, R));
  if (!rows.narrow) return;
  whole_TP = add("inputs of the layer", rows.all, P, kActivation, Stage::input);
  part_RP = add("inputs of output rows", R, P, kActivation, Stage::input);
}

InputBackwardBuffers::InputBackwardBuffers(const BlockShape& b, const BlockRows& rows) : BufferList(b.bytes) {
  const std::int64_t R = rows.continuing, P = b.shape.layer_inputs.width, M = b.shape.hidden;
  stream_RM = add("stream behind the MLP", R, M);
  gated_RW = add("gate and input of the layer", R, 2 * P);
  act_RP = add("gated input", R, P);
  grad_branch_RM = add("gradient of the input's product", R, M);
  grad_gate_RP = add("gradient of the input's gate", R, P);
  gate_product = add_product(*this, b, "product for the input's gate", P, M, 0);
  projection_product = add_product(*this, b, "product for the input's projection", M, P, 0);
  if (adapts(b, DenseProductNumbers::input_gate) || adapts(b, DenseProductNumbers::input_projection))
    nest(0, low_rank_bytes(b, R));
  if (!rows.narrow) return;
  whole_TP = add("inputs of the layer", rows.all, P);
  part_RP = add("inputs of output rows", R, P);
}

ExpertForwardBuffers::ExpertForwardBuffers(const BlockShape& b, std::int64_t rows, bool with_output)
    : BufferList(b.bytes) {
  const std::int64_t M = b.shape.hidden;
  const bool apart = b.shape.shared_expert.apart, results = with_output || apart;
  normed_RM = add("normalised rows", rows, M, kActivation, Stage::router, Stage::shared);
  if (wide_router(b)) {
    wide_normed_RM = add("widened rows", rows, M, kAccumulator, Stage::router);
    wide_router_EM = add("widened router", b.shape.experts, M, kAccumulator, Stage::router);
  }
  if (results) sum_RM = add("sum over experts", rows, M, kAccumulator, Stage::experts, Stage::shared);
  expert_rows_RM = add("rows of an expert", rows, M, kActivation, Stage::experts, Stage::shared);
  low_rank_Rr = add_expert_low_rank(*this, b, rows, Stage::experts, Stage::shared);
  if (adapts(b, ExpertProductNumbers::router)) nest(Stage::router, router_low_rank_bytes(b, rows));
  if (adapts(b, ExpertProductNumbers::shared_gate)) nest(Stage::shared, low_rank_bytes(b, rows));
  if (results) act_RF = add("activation of an expert", rows, b.shape.expert_inner, kActivation, Stage::experts);
  if (results && b.shape.shared_expert.inner > 0)
    shared_act_RF =
        add("activation of the shared expert", rows, b.shape.shared_expert.inner, kActivation, Stage::shared);
  if (apart) branch_RM = add("a result behind its norm", rows, M, kActivation, Stage::shared);
}

ExpertBackwardBuffers::ExpertBackwardBuffers(const BlockShape& b, std::int64_t rows) : BufferList(b.bytes) {
  const std::int64_t M = b.shape.hidden, F = b.shape.expert_inner, E = b.shape.experts, k = b.shape.experts_per_token;
  normed_RM = add("normalised rows", rows, M, kActivation, Stage::experts, Stage::router);
  grad_weight_RK = add("gradient of weights", rows, k, kAccumulator, Stage::experts, Stage::router);
  grad_normed_sum_RM = add("gradient of normalised rows", rows, M, kAccumulator, Stage::experts, Stage::router);
  const SharedExpert& shared = b.shape.shared_expert;
  if (shared.gate)
    grad_shared_weight_R1 =
        add("gradient of the shared expert's weights", rows, 1, kAccumulator, Stage::experts, Stage::router);
  if (shared.apart) {
    grad_branch_RM = add("gradient of the sum of both results", rows, M, kActivation, Stage::experts, Stage::shared);
    grad_result_RM = add("gradient of a result", rows, M, kActivation, Stage::experts, Stage::shared);
  }
  expert_rows_RM = add("rows of an expert", rows, M, kActivation, Stage::experts, Stage::shared);
  low_rank_Rr = add_expert_low_rank(*this, b, rows, Stage::experts, Stage::shared);
  if (adapts(b, ExpertProductNumbers::router)) nest(Stage::router, router_low_rank_bytes(b, rows));
  if (adapts(b, ExpertProductNumbers::shared_gate)) nest(Stage::router, low_rank_bytes(b, rows));
  act_RF = add("activation of an expert", rows, F, kActivation, Stage::experts);
  grad_gate_up_RW =
      add("gradient of gate and up of an expert", rows, b.shape.gate_up_width(F), kActivation, Stage::experts);
  expert_product = add_product(*this, b, "product for an expert", b.shape.gate_up_width(F), M, Stage::experts);
  if (shared.inner > 0) {
    const std::int64_t W = b.shape.gate_up_width(shared.inner);
    shared_act_RF = add("activation of the shared expert", rows, shared.inner, kActivation, Stage::shared);
    grad_shared_gate_up_RW = add("gradient of gate and up of the shared expert", rows, W, kActivation, Stage::shared);
    shared_product = add_product(*this, b, "product for the shared expert", W, M, Stage::shared);
  }
  grad_logits_RE =
      add("gradient of router logits", rows, E, wide_router(b) ? kAccumulator : kActivation, Stage::router);
  if (wide_router(b)) {
    wide_normed_RM = add("widened rows", rows, M, kAccumulator, Stage::router);
    wide_router_EM = add("widened router", E, M, kAccumulator, Stage::router);
  } else {
    router_product = add_product(*this, b, "product for the router", E, M, Stage::router);
  }
  if (!shared.gate) return;
  grad_shared_logit_R1 = add("gradient of logits of the shared expert's gate", rows, 1, kActivation, Stage::router);
  shared_gate_product =
      add_product(*this, b, "product for the shared expert's gate",
                  adapts(b, ExpertProductNumbers::shared_gate) ? low_rank_width(b.shape) : 1, M, Stage::router);
}

}  // namespace espalier
