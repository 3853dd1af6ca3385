// Attention at work:
//
//   q = rot(qnorm(n Wq^T)), k = rot(knorm(n Wk^T)), v = vnorm(n Wv^T),  attended = attention(q, k, v, source)
//
// A source (model/kv_source.h) runs the attention, over what its rows see. With an output gate Wq gives queries and
// gates, and the values are gated (ops/delta_rule.h has the operation). Values may be the rows of Wk (Gemma 4), and a
// layer may read the keys and values of an earlier one.
//
// Shapes: T rows, R rows with a query, H query heads, J key/value heads, D head size, M width.
#include <ATen/core/Tensor.h>

#include "espalier/device/held_buffers.h"
#include "espalier/mixers/attention/work.h"
#include "espalier/model/mixer_layer.h"

namespace espalier {
namespace {

const AttentionShape& shape_of(const LayerContext& c) { return static_cast<const Attention&>(*c.own.mixer).shape; }

// The weights of the mixer, or their gradients.
struct Views {
  explicit Views(const PartViews& views)
      : query(views.products[Attention::query]),
        key_value(views.products[Attention::key_value]),
        query_norm_D(views.tensors[Attention::query_norm]),
        key_norm_D(views.tensors[Attention::key_norm]),
        sinks_H(views.tensors[Attention::sinks]) {}

  // [H*D, M], with an output gate [H*2*D, M]; [2*J*D, M], keys then values, or keys alone, or nothing
  const Projection &query, &key_value;
  const at::Tensor &query_norm_D, &key_norm_D;  // or over all heads [H*D], [J*D]
  const at::Tensor& sinks_H;
};

// Tensors that the forward saves: queries and keys before norm and rotation; results, and their log-sum-exp.
struct Saved {
  Saved(const LayerContext& c, const SavedBuffers& saved) {
    const AttentionSaved declared(shape_of(c), c.block(), c.block_rows());
    kv_TW = saved[declared.kv_TW], q_RW = saved[declared.q_RW];
    attended_RW = saved[declared.attended_RW], lse_HR = saved[declared.lse_HR];
  }

  at::Tensor kv_TW, q_RW, attended_RW, lse_HR;
};

// Forward and backward have this in common.
class Pass {
 public:
  Pass(const LayerContext& context, const LayerSaved& layer)
      : c(context), s(shape_of(context)), w(context.weights.mixer), layer_saved(layer), saved(context, layer.mixer) {}

  Rotation rotation_of_queries() const {
    return rotation(c.rotations.back(), c.continuing_position_R(), w.query_norm_D);
  }
  Rotation rotation_of_keys() const { return rotation(c.rotations.front(), c.input.position_T, w.key_norm_D); }
  // Values do not turn, and their norm has no weight: 1 + 0 in unit_D.
  Rotation norm_of_values(const at::Tensor& unit_D) const {
    c.ops.zero(unit_D);
    Rotation out = rotation(c.rotations[Attention::kValueTables], c.input.position_T, unit_D);
    out.norm = NormKind::rms_plus_one;
    return out;
  }
  Rotation rotation(const RotaryTables& tables, const at::Tensor& position_R, const at::Tensor& norm_weight) const {
    return {tables, position_R, norm_weight, s.norm_eps, s.head_dim, s.interleaved, s.norm};
  }

  // Heads of queries, where each stands before its gate.
  at::Tensor without_gates(const at::Tensor& query_gate_RW) const {
    return query_gate_RW.view({-1, 2 * s.head_dim}).narrow(1, 0, s.head_dim);
  }
  // The projected queries; with an output gate they are copied to query_RW.
  at::Tensor queries(const at::Tensor& query_RW) const {
    if (!s.output_gate) return saved.q_RW;
    c.ops.convert(without_gates(saved.q_RW), query_RW.view({-1, s.head_dim}));
    return query_RW;
  }
  // The rows that the output's projection reads; with an output gate they are written to gated_RW.
  at::Tensor gated(const at::Tensor& gated_RW) const {
    if (!s.output_gate) return saved.attended_RW;
    c.ops.gate_heads(saved.attended_RW, saved.q_RW, s.head_dim, gated_RW);
    return gated_RW;
  }

  // The products that keys and values are made from.
  at::Tensor key_product() const { return saved.kv_TW.narrow(1, 0, s.key_width()); }
  at::Tensor value_product() const {
    return s.keys_as_values ? key_product() : saved.kv_TW.narrow(1, s.key_width(), s.key_width());
  }

  // Buffers of one attention.
  struct Buffers {
    const at::Tensor &rotated_q_RW, &rotated_k_TW, &normed_v_TW, &unit_D, &query_RW;
  };

  // Attention as its source runs it, from what was saved. Keys and values that the source keeps are written there in
  // the first forward only; others' keys are written to rotated_k.
  LayerAttention attention(bool write_kept, const Buffers& buffers) const {
    c.ops.rotate(rotation_of_queries(), queries(buffers.query_RW), buffers.rotated_q_RW);
    LayerAttention out{c.ops, c.timer, c.layer, s.head_dim, {}, buffers.rotated_q_RW, {}};
    if (s.has_keys()) {
      out.own = own_rows(write_kept, buffers);
    } else {
      out.source = s.source, out.own = c.kv.kept(s.source);
    }
    if (c.narrow) out.output_row_R = c.input.output_row_O;
    out.window = s.window, out.scale = s.scale, out.soft_cap = s.soft_cap;
    return out;
  }

  KeysValues own_rows(bool write_kept, const Buffers& buffers) const {
    const bool keeps = c.kv.keeps(c.layer);
    const at::Tensor v_TW = value_product();
    const KeysValues own =
        keeps ? c.kv.kept(c.layer) : KeysValues{buffers.rotated_k_TW, s.value_norm ? buffers.normed_v_TW : v_TW};
    if (keeps && !write_kept) return own;
    c.ops.rotate(rotation_of_keys(), key_product(), own.k);
    if (s.value_norm)
      c.ops.rotate(norm_of_values(buffers.unit_D), v_TW, own.v);
    else if (keeps)
      c.ops.convert(v_TW, own.v);
    return own;
  }

  const LayerContext& c;
  const AttentionShape& s;
  const Views w;
  const LayerSaved& layer_saved;
  const Saved saved;
};

class Forward final : public MixerForward {
 public:
  Forward(const LayerContext& c, const LayerSaved& saved)
      : pass_(c, saved), declared_(pass_.s, c.block(), c.block_rows(), 0), held_(c.arena, declared_, c.dtype()) {}

  void mix() override {
    using Stage = AttentionForwardBuffers::Stage;
    const LayerContext& c = pass_.c;
    const Saved& saved = pass_.saved;
    held_.enter(Stage::projection);
    const at::Tensor input_TM = c.mixer_input(pass_.layer_saved, held_[declared_.normed_TM]);
    if (pass_.s.has_keys()) c.products.linear(saved.kv_TW, input_TM, pass_.w.key_value);
    if (c.continuing() > 0)
      c.products.linear(saved.q_RW, c.continuing_rows(input_TM, held_[declared_.query_input_RM]), pass_.w.query);
    held_.enter(Stage::attention);
    const LayerAttention attention =
        pass_.attention(true, {held_[declared_.rotated_q_RW], held_[declared_.rotated_k_TW],
                               held_[declared_.normed_v_TW], held_[declared_.unit_D], held_[declared_.query_RW]});
    c.kv.attend(attention, saved.attended_RW, saved.lse_HR);
    if (pass_.s.has_keys()) c.kv.leave(attention);
    if (c.continuing() > 0 && pass_.w.sinks_H.defined()) join_sinks();
  }

  at::Tensor mixed() override {
    held_.enter(AttentionForwardBuffers::Stage::output);
    return pass_.gated(held_[declared_.gated_RW]);
  }

 private:
  // As attend wrote them: for all queries, or for runs of them.
  void join_sinks() const {
    const LayerContext& c = pass_.c;
    const Saved& saved = pass_.saved;
    const std::int64_t heads = saved.lse_HR.size(0);
    std::vector<std::int64_t> runs = c.kv.query_runs();
    if (runs.empty()) runs = {saved.lse_HR.size(1)};
    std::int64_t first = 0;
    for (const std::int64_t queries : runs) {
      c.ops.join_sinks(pass_.w.sinks_H, saved.attended_RW.narrow(0, first, queries),
                       saved.lse_HR.view({-1}).narrow(0, first * heads, queries * heads).view({heads, queries}));
      first += queries;
    }
  }

  const Pass pass_;
  const AttentionForwardBuffers declared_;
  HeldBuffers held_;
};

class Backward final : public MixerBackward {
 public:
  Backward(const LayerContext& c, const LayerSaved& saved, const PartViews& grads)
      : pass_(c, saved),
        grads_(grads),
        declared_(pass_.s, c.block(), c.block_rows(), {}),
        held_(c.arena, declared_, c.dtype()) {
    held_.enter(Stage::mlp);
  }

  void enter_output() override { held_.enter(Stage::output); }
  at::Tensor mixed_again() override { return pass_.gated(held_[declared_.gated_RW]); }
  at::Tensor grad_mixed() override { return held_[declared_.grad_attended_RW]; }

  at::Tensor add() override {
    const LayerContext& c = pass_.c;
    const bool continues = c.continuing() > 0;
    held_.enter(Stage::attention);
    add_attention();
    held_.enter(Stage::key_value);
    const at::Tensor& grad_input_TM = held_[declared_.normed_TM];  // until then the input itself
    const at::Tensor input_TM =
        c.mixer_input_again(pass_.layer_saved, grad_input_TM, grads_.key_value.trains() || grads_.query.trains());
    const at::Tensor &grad_kv_TW = held_[declared_.grad_kv_TW], &grad_q_RW = held_[declared_.grad_q_RW];
    if (pass_.s.has_keys())
      c.products.add_linear_grad_weight(grads_.key_value, pass_.w.key_value, grad_kv_TW, input_TM,
                                        held_[declared_.kv_product]);
    held_.enter(Stage::query);
    if (continues && grads_.query.trains())
      c.products.add_linear_grad_weight(grads_.query, pass_.w.query, grad_q_RW,
                                        c.continuing_rows(input_TM, held_[declared_.query_input_RM]),
                                        held_[declared_.query_product]);
    held_.enter(Stage::input);
    const bool has_keys = pass_.s.has_keys();
    if (has_keys)
      c.products.linear_grad_input(grad_input_TM, grad_kv_TW, pass_.w.key_value);
    else if (c.narrow || !continues)
      c.ops.zero(grad_input_TM);
    if (c.narrow && continues) {
      const at::Tensor& part_RM = held_[declared_.query_part_RM];
      c.products.linear_grad_input(part_RM, grad_q_RW, pass_.w.query);
      c.ops.add_scatter(part_RM, c.input.output_row_O, grad_input_TM);
    } else if (!c.narrow && has_keys) {
      c.products.add_linear_grad_input(grad_input_TM, grad_q_RW, pass_.w.query);
    } else if (continues) {
      c.products.linear_grad_input(grad_input_TM, grad_q_RW, pass_.w.query);
    }
    return grad_input_TM;
  }

 private:
  using Stage = AttentionBackwardBuffers::Stage;

  // dL/dq, dL/dk, dL/dv of the projections' outputs from dL/d(attended).
  void add_attention() {
    const LayerContext& c = pass_.c;
    const AttentionShape& s = pass_.s;
    const Saved& saved = pass_.saved;
    const at::Tensor &grad_attended_RW = held_[declared_.grad_attended_RW], &grad_q_RW = held_[declared_.grad_q_RW],
                     &grad_rotated_q_RW = held_[declared_.grad_rotated_q_RW], &unit_D = held_[declared_.unit_D];
    const LayerAttention attention =
        pass_.attention(false, {held_[declared_.rotated_q_RW], held_[declared_.rotated_k_TW],
                                held_[declared_.normed_v_TW], unit_D, held_[declared_.query_RW]});
    if (s.output_gate)
      c.ops.gate_heads_backward(saved.attended_RW, saved.q_RW, s.head_dim, grad_attended_RW, grad_attended_RW,
                                grad_q_RW);
    if (grads_.sinks_H.defined() && c.continuing() > 0)
      c.ops.add_sinks_backward(pass_.w.sinks_H, saved.attended_RW, saved.lse_HR, grad_attended_RW, grads_.sinks_H);
    KeysValues own = c.kv.gathered(attention.source);
    if (s.has_keys() && !c.kv.keeps(c.layer)) {
      own = {held_[declared_.grad_k_TW], held_[declared_.grad_v_TW]};
      c.ops.zero(own.k);
      c.ops.zero(own.v);
      c.kv.add_gathered(c.ops, c.layer, own);
    }
    c.kv.add_backward(attention, saved.attended_RW, saved.lse_HR, grad_attended_RW, grad_rotated_q_RW, own);
    c.ops.add_rotate_backward(pass_.rotation_of_queries(), s.output_gate ? held_[declared_.query_RW] : saved.q_RW,
                              grad_rotated_q_RW, s.output_gate ? held_[declared_.grad_query_RW] : grad_q_RW,
                              grads_.query_norm_D);
    if (s.output_gate)
      c.ops.convert(held_[declared_.grad_query_RW].view({-1, s.head_dim}), pass_.without_gates(grad_q_RW));
    if (s.has_keys()) add_own_rows(own);
  }

  // dL/d of the products for keys and values.
  void add_own_rows(const KeysValues& own) {
    const LayerContext& c = pass_.c;
    const AttentionShape& s = pass_.s;
    const std::int64_t T = c.rows(), K = s.key_width();
    const at::Tensor &grad_kv_TW = held_[declared_.grad_kv_TW], &grad_value_TW = held_[declared_.grad_value_TW];
    c.ops.add_rotate_backward(pass_.rotation_of_keys(), pass_.key_product(), own.k.view({T, K}),
                              grad_kv_TW.narrow(1, 0, K), grads_.key_norm_D);
    const at::Tensor grad_v_TW = s.keys_as_values ? grad_value_TW : grad_kv_TW.narrow(1, K, K);
    if (s.value_norm)
      c.ops.add_rotate_backward(pass_.norm_of_values(held_[declared_.unit_D]), pass_.value_product(),
                                own.v.view({T, K}), grad_v_TW, {});
    else
      c.ops.convert(own.v.view({T, K}), grad_v_TW);
    if (s.keys_as_values) c.ops.add_scaled(grad_kv_TW, grad_value_TW, 1, grad_kv_TW);
  }

  const Pass pass_;
  const Views grads_;
  const AttentionBackwardBuffers declared_;
  HeldBuffers held_;
};

}  // namespace

extern const MixerLayer attention_layer;
const MixerLayer attention_layer{
    [](const LayerContext& c) {
      return SavedBuffers(c.arena, AttentionSaved(shape_of(c), c.block(), c.block_rows()), c.dtype());
    },
    [](const LayerContext& c, const LayerSaved& saved) -> std::unique_ptr<MixerForward> {
      return std::make_unique<Forward>(c, saved);
    },
    [](const LayerContext& c, const LayerSaved& saved, const PartViews& grads) -> std::unique_ptr<MixerBackward> {
      return std::make_unique<Backward>(c, saved, grads);
    }};

}  // namespace espalier
