#include "espalier/forecast/block_buffers.h"

#include <algorithm>

namespace espalier {
namespace {

constexpr std::int64_t kHeadBlockRows = 256;
constexpr std::int64_t kHeadBlockBytes = std::int64_t{64} << 20;  // of logits
// Where products write sums: a GPU's, which wants some thousand rows and has the memory.
constexpr std::int64_t kLargeHeadBlockRows = 4096;
constexpr std::int64_t kLargeHeadBlockBytes = std::int64_t{512} << 20;
constexpr std::int64_t kHeadWidenedBytes = std::int64_t{16} << 20;  // of weights held in the accumulator's type at once

constexpr Element kActivation = Element::activation, kAccumulator = Element::accumulator, kInt32 = Element::int32;

std::int64_t q_width(const BlockShape& b) { return b.shape.query_width(); }
std::int64_t k_width(const BlockShape& b) { return b.shape.key_width(); }
std::int64_t v_width(const BlockShape& b) { return b.shape.value_width(); }
// Of what the query's projection gives.
std::int64_t query_width(const BlockShape& b) { return (b.shape.attention.output_gate ? 2 : 1) * q_width(b); }

constexpr std::int64_t kPathLatentBlock = 1024;  // rows of the path that are expanded from latents at once

// The gradient of a weight [outputs, inputs] before it is added, where it is rounded first.
template <class Stage>
BufferList::Place add_product(BufferList& list, const BlockShape& b, std::string_view name, std::int64_t outputs,
                              std::int64_t inputs, Stage stage) {
  return b.rounds_weight_gradients ? list.add(name, outputs, inputs, kActivation, stage) : BufferList::Place{};
}

// x A^T, or the gradient of it: one at a time (model/products.h).
std::int64_t low_rank_bytes(const BlockShape& b, std::int64_t rows) {
  return arena_bytes(rows * b.shape.trained.adapter.rank * b.bytes.activation);
}
const AdaptedLayer& adapted(const BlockShape& b) { return b.shape.trained.adapter.somewhere; }

// Whether router logits are wider than rows.
bool wide_router(const BlockShape& b) { return b.shape.router.wide && b.bytes.activation != b.bytes.accumulator; }

// Beside wide logits A and B are widened, too.
std::int64_t router_low_rank_bytes(const BlockShape& b, std::int64_t rows) {
  if (!wide_router(b)) return low_rank_bytes(b, rows);
  const std::int64_t r = b.shape.trained.adapter.rank, bytes = b.bytes.accumulator;
  return arena_bytes(r * b.shape.hidden * bytes) + arena_bytes(b.shape.experts * r * bytes) +
         arena_bytes(rows * r * bytes);
}

bool adapts_keys_values(const BlockShape& b) {
  return adapted(b).key || adapted(b).value || adapted(b).key_value_latent;
}
bool adapts_queries(const BlockShape& b) { return adapted(b).query || adapted(b).query_latent; }

// The same for experts and the shared expert.
template <class Stage>
BufferList::Place add_expert_low_rank(BufferList& list, const BlockShape& b, std::int64_t rows, Stage first,
                                      Stage last) {
  if (!adapted(b).experts() && !adapted(b).shared()) return {};
  return list.add("rows of low rank", rows, b.shape.trained.adapter.rank, kActivation, first, last);
}

std::int64_t mlp_backward_bytes(const BlockShape& b, const BlockRows& rows) {
  if (!rows.mlp || rows.continuing == 0) return 0;
  return rows.experts ? ExpertBackwardBuffers(b, rows.continuing).peak()
                      : DenseBackwardBuffers(b, rows.continuing).peak();
}

}  // namespace

std::int64_t mlp_forward_bytes(const BlockShape& b, const BlockRows& rows, bool with_output) {
  if (!rows.mlp || rows.continuing == 0) return 0;
  return rows.experts ? ExpertForwardBuffers(b, rows.continuing, with_output).peak()
                      : DenseForwardBuffers(b, rows.continuing, with_output).peak();
}

PathWidths path_widths(const ModelShape& shape, bool latents) {
  if (latents) return {shape.latent.key_value, shape.latent.rotary};
  return {shape.key_width(), shape.value_width()};
}

PathBuffers::PathBuffers(const BlockShape& b, std::int64_t rows, bool with_gradients, bool latents)
    : BufferList(b.bytes) {
  const PathWidths widths = path_widths(b.shape, latents);
  first_PW = add(latents ? "normalised latents of the path" : "keys", rows, widths.first);
  second_PW = add(latents ? "shared keys of the path" : "values", rows, widths.second);
  if (!with_gradients) return;
  grad_first_PW =
      add(latents ? "gradients of latents of the path" : "gradients of keys", rows, widths.first, kAccumulator);
  grad_second_PW =
      add(latents ? "gradients of shared keys of the path" : "gradients of values", rows, widths.second, kAccumulator);
}

PathRoomBuffers::PathRoomBuffers(const BlockShape& b, std::int64_t rows, bool with_gradients) : BufferList(b.bytes) {
  const LatentShape& latent = b.shape.latent;
  const std::int64_t block = std::min(rows, kPathLatentBlock);
  k_PW = add("keys", rows, k_width(b));
  v_PW = add("values", rows, v_width(b));
  kv_BW = add("heads of a block of the path", block, b.shape.key_value_width());
  if (adapts_keys_values(b)) nest(0, low_rank_bytes(b, block));
  if (!with_gradients) return;
  grad_k_PW = add("gradients of keys", rows, k_width(b), kAccumulator);
  grad_v_PW = add("gradients of values", rows, v_width(b), kAccumulator);
  grad_latent_BC = add("gradients of latents of a block", block, latent.key_value);
  sum_latent_BC = add("sums for latents of a block", block, latent.key_value, kAccumulator);
  sum_rotary_BK = add("sums for shared keys of a block", block, latent.rotary, kAccumulator);
}

ItemBuffers::ItemBuffers(const BlockShape& b, std::int64_t outputs, bool with_gradients) : BufferList(b.bytes) {
  if (with_gradients) grad_normed_OM = add("gradient of normalised outputs", outputs, b.shape.hidden);
  final_stream_OM = add("final stream", outputs, b.shape.hidden);
  normed_OM = add("normalised outputs", outputs, b.shape.hidden);
  final_rstd_O = add("1/rms of outputs", outputs, Buffer::kVector, kAccumulator);
}

StateBuffers::StateBuffers(const BlockShape& b, bool with_gradients) : BufferList(b.bytes) {
  const std::int64_t layers = b.shape.states_in(0, b.shape.layers), N = b.shape.delta_rule.state();
  if (layers == 0) return;
  states_LN = add("states", layers, N, kAccumulator);
  if (with_gradients) grad_states_LN = add("gradients of states", layers, N, kAccumulator);
}

StreamBuffer::StreamBuffer(const BlockShape& b, std::int64_t rows) : BufferList(b.bytes) {
  stream_TM = add("stream", rows, b.shape.hidden);
}

AttentionSavedBuffers::AttentionSavedBuffers(const BlockShape& b, const BlockRows& rows) : BufferList(b.bytes) {
  const ModelShape& s = b.shape;
  const std::int64_t R = rows.continuing;
  if (b.has_norms_before()) norm_rstd_T = add("1/rms of inputs", rows.all, Buffer::kVector, kAccumulator);
  if (rows.mixer == Mixer::delta_rule) {
    projected_TW = add("projected rows", rows.all, s.delta_rule.projected());
    mixed_TV = add("mixed rows", rows.all, s.delta_rule.value_width());
    if (s.delta_rule.decays_channels())
      gate_latents_TC = add("latents of gates", rows.all, 2 * s.delta_rule.gate_latent);
    stream_mid_RM = add("stream after the mixer", R, s.hidden);
    return;
  }
  if (s.has_latents()) {
    if (s.latent.query > 0) {
      query_latent_RC = add("latents of queries", R, s.latent.query);
      query_latent_rstd_R = add("1/rms of latents of queries", R, Buffer::kVector, kAccumulator);
    }
    latent_TC = add("latents of keys and values", rows.all, s.latent.key_value);
    latent_rstd_T = add("1/rms of latents", rows.all, Buffer::kVector, kAccumulator);
    rotary_key_TK = add("shared keys", rows.all, s.latent.rotary);
  }
  if (!gives_latents(b, rows)) kv_TW = add("keys and values", rows.all, s.key_value_width());
  q_RW = add("queries", R, query_width(b));
  attended_RW = add("attended values", R, s.attended_width());
  lse_HR = add("log-sum-exp of attention", s.heads, R, kAccumulator);
  stream_mid_RM = add("stream after attention", R, s.hidden);
  if (!b.has_norms_after()) return;
  branch_RM = add("output of attention", R, s.hidden);
  branch_rstd_R = add("1/rms of attention's output", R, Buffer::kVector, kAccumulator);
}

MlpSavedBuffers::MlpSavedBuffers(const BlockShape& b, const BlockRows& rows) : BufferList(b.bytes) {
  const ModelShape& s = b.shape;
  const std::int64_t R = rows.continuing, k = s.experts_per_token;
  if (!rows.mlp) return;
  if (b.has_norms_before()) mlp_rstd_R = add("1/rms before the MLP", R, Buffer::kVector, kAccumulator);
  if (!rows.experts) {
    gate_up_RW = add("gate and up", R, s.gate_up_width());
    if (!b.has_norms_after()) return;
    branch_RM = add("output of the MLP", R, s.hidden);
    branch_rstd_R = add("1/rms of the MLP's output", R, Buffer::kVector, kAccumulator);
    return;
  }
  gate_up_RW = add("gate and up of experts", R * k, s.gate_up_width(s.expert_inner));
  router_logits_RE = add("router logits", R, s.experts, wide_router(b) ? kAccumulator : kActivation);
  router_choice_RK = add("chosen experts", R, k, kInt32);
  router_weight_RK = add("weights of experts", R, k, kAccumulator);
  if (s.shared_expert.inner == 0) return;
  shared_gate_up_RW = add("gate and up of the shared expert", R, s.gate_up_width(s.shared_expert.inner));
  if (!s.shared_expert.gate) return;
  shared_logit_R1 = add("logits of the shared expert's gate", R, 1);
  shared_weight_R1 = add("weights of the shared expert", R, 1, kAccumulator);
}

DenseForwardBuffers::DenseForwardBuffers(const BlockShape& b, std::int64_t rows, bool with_output)
    : BufferList(b.bytes) {
  if (b.has_norms_before()) normed_RM = add("normalised rows", rows, b.shape.hidden, kActivation, Stage::up);
  if (with_output || b.has_norms_after()) act_RF = add("activation", rows, b.shape.inner, kActivation, Stage::down);
  if (act_RF.index >= 0 && b.finishes_branch())
    branch_RM = add("addition to the stream", rows, b.shape.hidden, kActivation, Stage::down);
  if (adapted(b).gate || adapted(b).up) nest(Stage::up, low_rank_bytes(b, rows));
  if (adapted(b).down && act_RF.index >= 0) nest(Stage::down, low_rank_bytes(b, rows));
}

DenseBackwardBuffers::DenseBackwardBuffers(const BlockShape& b, std::int64_t rows) : BufferList(b.bytes) {
  const std::int64_t M = b.shape.hidden, F = b.shape.inner;
  act_RF = add("activation", rows, F, kActivation, Stage::down, Stage::up);
  down_product = add_product(*this, b, "product of down", M, F, Stage::down);
  if (b.finishes_branch()) grad_branch_RM = add("gradient of the MLP's output", rows, M, kActivation, Stage::down);
  normed_RM = add("normalised rows", rows, M, kActivation, Stage::up);
  gate_up_product = add_product(*this, b, "product for gate and up", b.shape.gate_up_width(), M, Stage::up);
  if (adapted(b).gate || adapted(b).up) nest(Stage::up, low_rank_bytes(b, rows));
  if (adapted(b).down) nest(Stage::down, low_rank_bytes(b, rows));
}

ExpertForwardBuffers::ExpertForwardBuffers(const BlockShape& b, std::int64_t rows, bool with_output)
    : BufferList(b.bytes) {
  const std::int64_t M = b.shape.hidden;
  normed_RM = add("normalised rows", rows, M, kActivation, Stage::router, Stage::shared);
  if (wide_router(b)) {
    wide_normed_RM = add("widened rows", rows, M, kAccumulator, Stage::router);
    wide_router_EM = add("widened router", b.shape.experts, M, kAccumulator, Stage::router);
  }
  if (with_output) sum_RM = add("sum over experts", rows, M, kAccumulator, Stage::experts, Stage::shared);
  expert_rows_RM = add("rows of an expert", rows, M, kActivation, Stage::experts, Stage::shared);
  low_rank_Rr = add_expert_low_rank(*this, b, rows, Stage::experts, Stage::shared);
  if (adapted(b).router) nest(Stage::router, router_low_rank_bytes(b, rows));
  if (adapted(b).shared_expert_gate) nest(Stage::shared, low_rank_bytes(b, rows));
  if (with_output) act_RF = add("activation of an expert", rows, b.shape.expert_inner, kActivation, Stage::experts);
  if (with_output && b.shape.shared_expert.inner > 0)
    shared_act_RF =
        add("activation of the shared expert", rows, b.shape.shared_expert.inner, kActivation, Stage::shared);
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
  expert_rows_RM = add("rows of an expert", rows, M, kActivation, Stage::experts, Stage::shared);
  low_rank_Rr = add_expert_low_rank(*this, b, rows, Stage::experts, Stage::shared);
  if (adapted(b).router) nest(Stage::router, router_low_rank_bytes(b, rows));
  if (adapted(b).shared_expert_gate) nest(Stage::router, low_rank_bytes(b, rows));
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
  shared_gate_product = add_product(*this, b, "product for the shared expert's gate",
                                    adapted(b).shared_expert_gate ? b.shape.trained.adapter.rank : 1, M, Stage::router);
}

LayerForwardBuffers::LayerForwardBuffers(const BlockShape& b, const BlockRows& rows, bool with_output)
    : BufferList(b.bytes) {
  const std::int64_t T = rows.all, R = rows.continuing, M = b.shape.hidden;
  if (b.has_norms_before()) normed_TM = add("normalised rows", T, M, kActivation, Stage::projection);
  if (rows.narrow) query_input_RM = add("normalised output rows", R, M, kActivation, Stage::projection);
  if (b.shape.latent.query > 0)
    query_latent_RC = add("normalised latents of queries", R, b.shape.latent.query, kActivation, Stage::projection);
  if (b.shape.has_latents())
    latent_TC = add("normalised latents", T, b.shape.latent.key_value, kActivation, Stage::projection);
  rotated_q_RW = add("rotated queries", R, q_width(b), kActivation, Stage::attention);
  const bool own = !rows.in_path && !gives_latents(b, rows);
  if (own) rotated_k_TW = add("rotated keys", T, k_width(b), kActivation, Stage::attention);
  if (own && b.shape.has_latents()) value_TW = add("values", T, v_width(b), kActivation, Stage::attention);
  if (b.shape.attention.output_gate) {
    query_RW = add("queries without gates", R, q_width(b), kActivation, Stage::attention);
    gated_RW = add("gated values", R, q_width(b), kActivation, Stage::residual);
  }
  if (rows.narrow) residual_RM = add("stream of outputs", R, M, kActivation, Stage::residual);
  if (b.finishes_branch()) branch_RM = add("addition to the stream", R, M, kActivation, Stage::residual);
  if (adapts_keys_values(b)) nest(Stage::projection, low_rank_bytes(b, T));
  if (adapts_queries(b)) nest(Stage::projection, low_rank_bytes(b, R));
  if (adapted(b).output) nest(Stage::residual, low_rank_bytes(b, R));
  nest(Stage::mlp, mlp_forward_bytes(b, rows, with_output));
  if (rows.ranks > 1)
    nest(Stage::attention, DividedForwardBuffers(b, RowShares(T * rows.ranks, rows.ranks), true).peak());
}

LayerBackwardBuffers::LayerBackwardBuffers(const BlockShape& b, const BlockRows& rows) : BufferList(b.bytes) {
  const std::int64_t T = rows.all, R = rows.continuing, M = b.shape.hidden, Q = q_width(b), K = k_width(b),
                     V = v_width(b), A = b.shape.attended_width(), KV = b.shape.key_value_width();
  const LatentShape& latent = b.shape.latent;
  const bool latents = b.shape.has_latents(), query_latents = latents && latent.query > 0,
             gives = gives_latents(b, rows), own = !rows.in_path && !gives;
  grad_attended_RW = add("gradient of attended values", R, A, kActivation, Stage::mlp, Stage::input);
  nest(Stage::mlp, mlp_backward_bytes(b, rows));
  const bool gated = b.shape.attention.output_gate;
  if (gated) gated_RW = add("gated values", R, A, kActivation, Stage::output);
  if (R > 0) output_product = add_product(*this, b, "product for the output", M, A, Stage::output);
  if (R > 0 && b.finishes_branch())
    grad_branch_RM = add("gradient of attention's output", R, M, kActivation, Stage::output);
  grad_q_RW = add("gradient of queries", R, query_width(b), kActivation, Stage::attention, Stage::input);
  if (gives)
    grad_normed_latent_TC =
        add("gradient of normalised latents", T, latent.key_value, kActivation, Stage::attention, Stage::input);
  else
    grad_kv_TW = add("gradient of keys and values", T, KV, kActivation, Stage::attention, Stage::input);
  if (latents)
    grad_rotary_key_TK = add("gradient of shared keys", T, latent.rotary, kActivation, Stage::attention, Stage::input);
  rotated_q_RW = add("rotated queries", R, Q, kActivation, Stage::attention);
  if (own) rotated_k_TW = add("rotated keys", T, K, kActivation, Stage::attention);
  grad_rotated_q_RW = add("gradient of rotated queries", R, Q, kActivation, Stage::attention);
  if (gated) query_RW = add("queries without gates", R, Q, kActivation, Stage::attention);
  if (gated) grad_query_RW = rotated_q_RW;  // which attention's backward has read by then
  if (own) grad_k_TW = add("gradient of rotated keys", T, K, kAccumulator, Stage::attention);
  if (own) grad_v_TW = add("gradient of values", T, V, kAccumulator, Stage::attention);
  if (latents) {
    if (own) value_TW = add("values", T, V, kActivation, Stage::attention);
    grad_rotary_key_sum_TK = add("sum over heads for shared keys", T, latent.rotary, kAccumulator, Stage::attention);
    grad_latent_TC = add("gradient of latents", T, latent.key_value, kActivation, Stage::key_value, Stage::input);
    if (query_latents)
      grad_query_latent_RC =
          add("gradient of latents of queries", R, latent.query, kActivation, Stage::key_value, Stage::input);
  }
  normed_TM = add("normalised rows", T, M, kActivation, Stage::key_value, Stage::input);
  if (!gives)
    kv_product =
        add_product(*this, b, "product for keys and values", KV, latents ? latent.key_value : M, Stage::key_value);
  if (latents) {
    if (!gives) latent_TC = add("normalised latents", T, latent.key_value, kActivation, Stage::key_value);
    latent_product =
        add_product(*this, b, "product for latents", std::max(latent.key_value, latent.rotary), M, Stage::key_value);
  }
  if (R > 0 && rows.narrow) query_input_RM = add("normalised output rows", R, M, kActivation, Stage::query);
  if (R > 0)
    query_product =
        add_product(*this, b, "product for queries", query_width(b), query_latents ? latent.query : M, Stage::query);
  if (R > 0 && query_latents) {
    query_latent_RC = add("normalised latents of queries", R, latent.query, kActivation, Stage::query);
    query_latent_product = add_product(*this, b, "product for latents of queries", latent.query, M, Stage::query);
  }
  if (R > 0 && rows.narrow) query_part_RM = add("gradient of normalised outputs", R, M, kActivation, Stage::input);
  for (const Stage stage : {Stage::key_value, Stage::input})
    if (adapts_keys_values(b)) nest(stage, low_rank_bytes(b, T));
  for (const Stage stage : {Stage::query, Stage::input})
    if (adapts_queries(b)) nest(stage, low_rank_bytes(b, R));
  if (adapted(b).output) nest(Stage::output, low_rank_bytes(b, R));
  if (rows.ranks > 1)
    nest(Stage::attention, DividedBackwardBuffers(b, RowShares(T * rows.ranks, rows.ranks), true).peak());
}

DeltaForwardBuffers::DeltaForwardBuffers(const BlockShape& b, const BlockRows& rows) : BufferList(b.bytes) {
  const std::int64_t T = rows.all, R = rows.continuing, M = b.shape.hidden, V = b.shape.delta_rule.value_width();
  normed_TM = add("normalised rows", T, M, kActivation, Stage::projection);
  states_FN = add("states at forks", rows.forks, b.shape.delta_rule.state(), kAccumulator, Stage::rows);
  gated_TV = add("gated rows", T, V, kActivation, Stage::output);
  if (b.finishes_branch()) branch_RM = add("addition to the stream", R, M, kActivation, Stage::output);
  if (adapted(b).projects()) nest(Stage::projection, low_rank_bytes(b, T));
  if (adapted(b).state_output) nest(Stage::output, low_rank_bytes(b, R));
  if (!rows.narrow) return;
  gated_RV = add("gated rows of outputs", R, V, kActivation, Stage::output);
  residual_RM = add("stream of outputs", R, M, kActivation, Stage::output);
}

DeltaBackwardBuffers::DeltaBackwardBuffers(const BlockShape& b, const BlockRows& rows) : BufferList(b.bytes) {
  const DeltaRuleShape& s = b.shape.delta_rule;
  const std::int64_t T = rows.all, R = rows.continuing, M = b.shape.hidden, V = s.value_width();
  grad_mixed_TV = add("gradient of mixed rows", T, V, kActivation, Stage::mlp, Stage::input);
  nest(Stage::mlp, mlp_backward_bytes(b, rows));
  gated_TV = add("gated rows", T, V, kActivation, Stage::output);
  if (rows.narrow) gated_RV = add("gated rows of outputs", R, V, kActivation, Stage::output);
  if (rows.narrow) grad_gated_RV = add("gradient of gated rows of outputs", R, V, kActivation, Stage::output);
  if (R > 0 && b.finishes_branch())
    grad_branch_RM = add("gradient of the mixer's output", R, M, kActivation, Stage::output);
  output_product = add_product(*this, b, "product for the output", M, V, Stage::output);
  grad_projected_TW = add("gradient of projected rows", T, s.projected(), kActivation, Stage::rows, Stage::input);
  states_FN = add("states at forks", rows.forks, s.state(), kAccumulator, Stage::rows);
  grad_states_FN = add("gradients of states at forks", rows.forks, s.state(), kAccumulator, Stage::rows);
  normed_TM = add("normalised rows", T, M, kActivation, Stage::input);
  projected_product = add_product(*this, b, "product for projected rows", s.projected_from_rows(), M, Stage::input);
  if (s.decays_channels()) {
    const std::int64_t C = s.gate_latent;
    grad_gate_latents_TC = add("gradient of latents of gates", T, 2 * C, kActivation, Stage::input);
    gate_latents_product = add_product(*this, b, "product for latents of gates", 2 * C, M, Stage::input);
    gate_z_product = add_product(*this, b, "product for gates of values", V, C, Stage::input);
    gate_a_product = add_product(*this, b, "product for decays", s.decays(), C, Stage::input);
  }
  if (adapted(b).projects()) nest(Stage::input, low_rank_bytes(b, T));
  if (adapted(b).state_output) nest(Stage::output, low_rank_bytes(b, R));
}

std::int64_t layer_forward_bytes(const BlockShape& b, const BlockRows& rows, bool with_output) {
  if (rows.mixer == Mixer::attention) return LayerForwardBuffers(b, rows, with_output).peak();
  return std::max(DeltaForwardBuffers(b, rows).peak(), mlp_forward_bytes(b, rows, with_output));
}
std::int64_t layer_backward_bytes(const BlockShape& b, const BlockRows& rows) {
  return rows.mixer == Mixer::attention ? LayerBackwardBuffers(b, rows).peak() : DeltaBackwardBuffers(b, rows).peak();
}

namespace {

std::int64_t whole_shares(const RowShares& shares) { return shares.ranks() * shares.most(); }

// The scratch of an adapter of what expands latents.
void nest_expansion(BufferList& list, const BlockShape& b, std::int64_t block, auto stage) {
  if (b.shape.has_latents() && adapts_keys_values(b)) list.nest(stage, low_rank_bytes(b, block));
}

}  // namespace

DividedForwardBuffers::DividedForwardBuffers(const BlockShape& b, const RowShares& shares, bool in_path)
    : BufferList(b.bytes) {
  const bool latents = b.shape.has_latents();
  const std::int64_t most = shares.most(), all = whole_shares(shares), block = std::min(all, kPathLatentBlock);
  const PathWidths given = path_widths(b.shape, latents);
  if (!in_path) {
    k_SW =
        add("keys of a set sharded over cp", shares.rows(), k_width(b), kActivation, Stage::exchange, Stage::attention);
    v_SW = add("values of a set sharded over cp", shares.rows(), v_width(b), kActivation, Stage::exchange,
               Stage::attention);
  }
  if (latents) {
    latent_SC =
        add("latents of a set sharded over cp", all, given.first, kActivation, Stage::exchange, Stage::expansion);
    rotary_SK =
        add("shared keys of a set sharded over cp", all, given.second, kActivation, Stage::exchange, Stage::expansion);
    kv_BW = add("heads of a block of the set", block, b.shape.key_value_width(), kActivation, Stage::expansion);
    nest_expansion(*this, b, block, Stage::expansion);
  }
  part = add("this rank's rows", most, given.sum(), kActivation, Stage::exchange);
  whole = add("rows of all ranks", all, given.sum(), kActivation, Stage::exchange);
}

DividedBackwardBuffers::DividedBackwardBuffers(const BlockShape& b, const RowShares& shares, bool in_path)
    : BufferList(b.bytes) {
  const bool latents = b.shape.has_latents();
  const std::int64_t K = k_width(b), V = v_width(b), S = shares.rows(), most = shares.most(),
                     all = whole_shares(shares), block = std::min(all, kPathLatentBlock);
  const PathWidths given = path_widths(b.shape, latents);
  const Stage last = latents ? Stage::latents : Stage::owners;  // that reads gradients of keys and values
  if (latents) {
    sum_latent_SC = add("sums for latents of the set", all, given.first, kAccumulator, Stage::exchange, Stage::owners);
    sum_rotary_SK =
        add("sums for shared keys of the set", all, given.second, kAccumulator, Stage::exchange, Stage::owners);
  }
  if (!in_path) {
    grad_k_SW = add("gradient of keys of a set sharded over cp", S, K, kAccumulator, Stage::exchange, last);
    grad_v_SW = add("gradient of values of a set sharded over cp", S, V, kAccumulator, Stage::exchange, last);
  }
  if (latents) {
    latent_SC = add("latents of a set sharded over cp", all, given.first, kActivation, Stage::exchange, Stage::latents);
    rotary_SK =
        add("shared keys of a set sharded over cp", all, given.second, kActivation, Stage::exchange, Stage::latents);
  }
  if (!in_path) {
    k_SW = add("keys of a set sharded over cp", S, K, kActivation, Stage::exchange, Stage::attention);
    v_SW = add("values of a set sharded over cp", S, V, kActivation, Stage::exchange, Stage::attention);
  }
  if (!in_path || latents) {
    part = add("this rank's rows", most, given.sum(), kActivation, Stage::exchange);
    whole = add("rows of all ranks", all, given.sum(), kActivation, Stage::exchange);
  }
  if (latents) {
    const std::int64_t KV = b.shape.key_value_width();
    if (!in_path) kv_BW = add("heads of a block of the set", block, KV, kActivation, Stage::expansion);
    grad_kv_BW = add("gradient of heads of a block", block, KV, kActivation, Stage::latents);
    grad_latent_BC = add("gradients of latents of a block", block, given.first, kActivation, Stage::latents);
    sum_latent_BC = add("sums for latents of a block", block, given.first, kAccumulator, Stage::latents);
    sum_rotary_BK = add("sums for shared keys of a block", block, given.second, kAccumulator, Stage::latents);
    product = add_product(*this, b, "product for keys and values", KV, given.first, Stage::latents);
    if (!in_path) nest_expansion(*this, b, block, Stage::expansion);
    nest_expansion(*this, b, block, Stage::latents);
  }
  grad_part = add("gradient of this rank's rows", most, given.sum(), kAccumulator, Stage::owners);
  grad_whole = add("gradient of rows for all ranks", all, given.sum(), kAccumulator, Stage::owners);
}

DecoderBackwardBuffers::DecoderBackwardBuffers(const BlockShape& b, std::int64_t rows, std::int64_t outputs)
    : BufferList(b.bytes) {
  grad_stream_OM = add("gradient of the final stream", outputs, b.shape.hidden);
  grad_stream_TM = add("gradient of the stream", rows, b.shape.hidden);
}

namespace {

std::int64_t head_block_rows(std::int64_t outputs, std::int64_t row_bytes, HeadWay way) {
  const std::int64_t bytes = way.writes_sums ? kLargeHeadBlockBytes : kHeadBlockBytes;
  const std::int64_t rows = way.writes_sums ? kLargeHeadBlockRows : kHeadBlockRows;
  return std::min(outputs, std::clamp<std::int64_t>(bytes / row_bytes, 1, rows));
}

}  // namespace

HeadBuffers::HeadBuffers(ElementBytes bytes, std::int64_t outputs, std::int64_t vocabulary, std::int64_t width,
                         bool with_gradients, HeadWay way)
    : BufferList(bytes),
      block_rows(head_block_rows(outputs, vocabulary * bytes.accumulator, way)),
      vocabulary_run(vocabulary) {
  if (outputs == 0) return;
  const std::size_t blocks = with_gradients && way.ahead && outputs > block_rows ? 2 : 1;
  for (std::size_t i = 0; i < blocks; ++i) rooms[i].logits_BV = add("logits", block_rows, vocabulary, kAccumulator);
  if (way.rank > 0) {
    low_rank_Br = add("hidden rows of low rank", block_rows, way.rank, kAccumulator);
    if (bytes.activation != bytes.accumulator) {
      low_rank_hidden_BM = add("widened hidden rows for the adapter", block_rows, width, kAccumulator);
      low_rank_a_rM = add("widened A", way.rank, width, kAccumulator);
      low_rank_b_Vr = add("widened B", vocabulary, way.rank, kAccumulator);
    }
  }
  if (bytes.activation == bytes.accumulator || (way.writes_sums && !with_gradients)) return;
  if (way.writes_sums) {
    grad_logits_BV = add("narrowed gradient of logits", block_rows, vocabulary, kActivation);
    grad_hidden_BM = add("gradient of hidden rows", block_rows, width, kAccumulator);
    return;
  }
  vocabulary_run = std::min(vocabulary, std::max<std::int64_t>(1, kHeadWidenedBytes / (width * bytes.accumulator)));
  weight_run_NM = add("widened weights", vocabulary_run, width, kAccumulator);
  for (std::size_t i = 0; i < blocks; ++i)
    rooms[i].hidden_BM = add("widened hidden rows", block_rows, width, kAccumulator);
  if (with_gradients) grad_hidden_BM = add("gradient of hidden rows", block_rows, width, kAccumulator);
}

}  // namespace espalier
