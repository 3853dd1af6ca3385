// Latent attention at work:
//
//   c = norm(n Wc^T), q = rot(.. Wq^T), kv = c Wkv^T, k = (kv[0, N), rot(n Wr^T)), v = kv[N, N + Dv) (ops/latent.h)
//   attended = attention(q, k, v, source)
//
// Queries may come from a latent of their own. Where the path carries latents, keys and values of its rows are expanded
// again (path_latents.h). Where ranks of cp share the rows, they give each other latents.
//
// Shapes: T rows, R rows with a query, H heads, C width of a latent, M width.
#include <ATen/core/Tensor.h>

#include "espalier/device/held_buffers.h"
#include "espalier/mixers/latent_attention/latent.h"
#include "espalier/mixers/latent_attention/path_latents.h"
#include "espalier/mixers/latent_attention/work.h"
#include "espalier/model/mixer_layer.h"

namespace espalier {
namespace {

struct Saved {
  Saved(const LayerContext& c, const SavedBuffers& saved) {
    const LatentSavedBuffers declared(latent_shape(c), c.block(), c.block_rows());
    query_latent = {saved[declared.query_latent_RC], saved[declared.query_latent_rstd_R]};
    latent = {saved[declared.latent_TC], saved[declared.latent_rstd_T]};
    rotary_key_TK = saved[declared.rotary_key_TK], kv_TW = saved[declared.kv_TW];
    q_RW = saved[declared.q_RW], attended_RW = saved[declared.attended_RW], lse_HR = saved[declared.lse_HR];
  }

  LatentSaved query_latent, latent;  // before their norm
  at::Tensor rotary_key_TK;          // rotated
  at::Tensor kv_TW, q_RW;            // before rotation
  at::Tensor attended_RW, lse_HR;
};

// Forward and backward have this in common.
class Pass : public LatentLayer {
 public:
  Pass(const LayerContext& context, const LayerSaved& layer, const PartViews* gradients)
      : c(context),
        s(latent_shape(context)),
        w(context.weights.mixer),
        layer_saved(layer),
        saved(context, layer.mixer),
        gives(context.kv.divides()),
        carries(carries_latents(context)),
        keeps(carries && context.kv.keeps(context.layer)) {
    if (gradients != nullptr) grads.emplace(*gradients);
  }

  void give(const KeysValues& to) const override {
    c.ops.norm_again(saved.latent.latent_RC, w.key_value_norm_C, saved.latent.rstd_R, to.k);
    c.ops.convert(saved.rotary_key_TK, to.v);
  }
  void expand(const LatentBlock& block, const PathLatents& rows, const PathHeads& expanded) const override {
    expand_rows(c, block, rows, expanded);
  }
  void add_expand_backward(const LatentBlock& block, const PathHeads& expanded, const PathLatents& rows,
                           const at::Tensor& product_NC) const override {
    add_expand_rows_backward(c, grads->key_value, block, expanded, rows, product_NC);
  }
  void add_expand_path_backward(std::int64_t rows, const at::Tensor& product_NC) const override {
    espalier::add_expand_path_backward(c, grads->key_value, rows, product_NC);
  }

  Rotation rotation_of_queries() const {
    Rotation queries = rotation(c.rotations.back(), c.continuing_position_R());
    queries.head_dim = s.head_dim(), queries.first = s.plain;
    return queries;
  }
  // The rotation of the row that all keys share.
  Rotation rotation_of_keys() const {
    Rotation shared = rotation(c.rotations.front(), c.input.position_T);
    shared.head_dim = s.rotary;
    return shared;
  }

  // Attention as its source runs it, from what was saved. Keys and values that the source keeps are written there in
  // the first forward only; others are written to rotated_k and to value_TW.
  LayerAttention attention(bool write_kept, const at::Tensor& rotated_q_RW, const at::Tensor& rotated_k_TW,
                           const at::Tensor& value_TW) const {
    const bool source_keeps = c.kv.keeps(c.layer);
    const KeysValues own = source_keeps ? c.kv.kept(c.layer) : KeysValues{rotated_k_TW, value_TW};
    c.ops.rotate(rotation_of_queries(), saved.q_RW, rotated_q_RW);
    if (!gives && (!source_keeps || write_kept)) c.ops.expand_heads(saved.kv_TW, saved.rotary_key_TK, own.k, own.v);
    LayerAttention out{c.ops, c.timer, c.layer, s.head_dim(), {}, rotated_q_RW, own};
    if (c.narrow) out.output_row_R = c.input.output_row_O;
    out.scale = s.scale, out.soft_cap = s.soft_cap;
    if (gives) out.latents = this;
    return out;
  }

  const LayerContext& c;
  const LatentShape& s;
  const LatentViews w;
  std::optional<LatentViews> grads;
  const LayerSaved& layer_saved;
  const Saved saved;
  const bool gives;    // the rows' latents to other ranks, which compute keys and values from them
  const bool carries;  // the path has latents,
  const bool keeps;    // and the rows' own, with the sums of their gradients

 private:
  Rotation rotation(const RotaryTables& tables, const at::Tensor& position_R) const {
    return {.tables = tables,
            .position_R = position_R,
            .norm_weight_D = {},
            .eps = c.shape.rms_norm_eps,
            .interleaved = s.interleaved};
  }
};

class Forward final : public MixerForward {
 public:
  Forward(const LayerContext& c, const LayerSaved& saved)
      : pass_(c, saved, nullptr),
        declared_(pass_.s, c.block(), c.block_rows(), 0),
        held_(c.arena, declared_, c.dtype()) {}

  void mix() override {
    using Stage = LatentForwardBuffers::Stage;
    const LayerContext& c = pass_.c;
    const Saved& saved = pass_.saved;
    held_.enter(Stage::projection);
    const at::Tensor input_TM = c.mixer_input(pass_.layer_saved, held_[declared_.normed_TM]);
    latent_forward(c, pass_.w.keys_values(), saved.latent, input_TM, held_[declared_.latent_TC], saved.kv_TW);
    c.products.linear(saved.rotary_key_TK, input_TM, pass_.w.rotary_key);
    c.ops.rotate(pass_.rotation_of_keys(), saved.rotary_key_TK, saved.rotary_key_TK);
    if (c.continuing() > 0) project_queries(c.continuing_rows(input_TM, held_[declared_.query_input_RM]));
    if (pass_.carries) expand_path(c, c.kv.path_rows());
    if (pass_.keeps) keep_latents(c, saved.latent, saved.rotary_key_TK);
    held_.enter(Stage::attention);
    const LayerAttention attention =
        pass_.attention(true, held_[declared_.rotated_q_RW], held_[declared_.rotated_k_TW], held_[declared_.value_TW]);
    c.kv.attend(attention, saved.attended_RW, saved.lse_HR);
    c.kv.leave(attention);
  }

  at::Tensor mixed() override {
    held_.enter(LatentForwardBuffers::Stage::output);
    return pass_.saved.attended_RW;
  }

 private:
  void project_queries(const at::Tensor& input_RM) const {
    const LayerContext& c = pass_.c;
    if (pass_.s.query == 0) return c.products.linear(pass_.saved.q_RW, input_RM, pass_.w.query);
    latent_forward(c, pass_.w.queries(), pass_.saved.query_latent, input_RM, held_[declared_.query_latent_RC],
                   pass_.saved.q_RW);
  }

  const Pass pass_;
  const LatentForwardBuffers declared_;
  HeldBuffers held_;
};

class Backward final : public MixerBackward {
 public:
  Backward(const LayerContext& c, const LayerSaved& saved, const PartViews& grads)
      : pass_(c, saved, &grads),
        declared_(pass_.s, c.block(), c.block_rows(), {}),
        held_(c.arena, declared_, c.dtype()) {
    held_.enter(Stage::mlp);
  }

  void enter_output() override { held_.enter(Stage::output); }
  at::Tensor mixed_again() override { return pass_.saved.attended_RW; }
  at::Tensor grad_mixed() override { return held_[declared_.grad_attended_RW]; }

  at::Tensor add() override {
    const LayerContext& c = pass_.c;
    const LatentViews &w = pass_.w, &grads = *pass_.grads;
    const bool continues = c.continuing() > 0, query_latents = pass_.s.query > 0;
    const Projection &query_weights = query_latents ? w.query_latent : w.query,
                     &query_grads = query_latents ? grads.query_latent : grads.query;
    if (pass_.carries) {
      expand_path(c, c.kv.path_rows_with_own());
      zero_expanded_gradients(c, c.kv.path_rows_with_own());
    }
    held_.enter(Stage::attention);
    add_attention();
    held_.enter(Stage::key_value);
    const at::Tensor& grad_input_TM = held_[declared_.normed_TM];  // until then the input itself
    const at::Tensor input_TM =
        c.mixer_input_again(pass_.layer_saved, grad_input_TM, grads.key_value_latent.trains() || query_grads.trains());
    add_key_value_latents();
    const at::Tensor &grad_latent_TC = held_[declared_.grad_latent_TC],
                     &grad_rotary_TK = held_[declared_.grad_rotary_key_TK], &product = held_[declared_.latent_product];
    c.products.add_linear_grad_weight(grads.key_value_latent, w.key_value_latent, grad_latent_TC, input_TM,
                                      first_of(product, pass_.s.key_value));
    c.products.add_linear_grad_weight(grads.rotary_key, w.rotary_key, grad_rotary_TK, input_TM,
                                      first_of(product, pass_.s.rotary));
    held_.enter(Stage::query);
    const at::Tensor grad_query_RW = continues ? add_query_latents() : held_[declared_.grad_q_RW];
    if (continues && query_grads.trains())
      c.products.add_linear_grad_weight(
          query_grads, query_weights, grad_query_RW, c.continuing_rows(input_TM, held_[declared_.query_input_RM]),
          held_[query_latents ? declared_.query_latent_product : declared_.query_product]);
    held_.enter(Stage::input);
    c.products.linear_grad_input(grad_input_TM, grad_latent_TC, w.key_value_latent);
    c.products.add_linear_grad_input(grad_input_TM, grad_rotary_TK, w.rotary_key);
    if (c.narrow && continues) {
      const at::Tensor& part_RM = held_[declared_.query_part_RM];
      c.products.linear_grad_input(part_RM, grad_query_RW, query_weights);
      c.ops.add_scatter(part_RM, c.input.output_row_O, grad_input_TM);
    } else if (!c.narrow) {
      c.products.add_linear_grad_input(grad_input_TM, grad_query_RW, query_weights);
    }
    return grad_input_TM;
  }

 private:
  using Stage = LatentBackwardBuffers::Stage;

  // Rows of a product's place, as many as it has.
  static at::Tensor first_of(const at::Tensor& product_NK, std::int64_t rows) {
    return product_NK.defined() ? product_NK.narrow(0, 0, rows) : product_NK;
  }

  // The gradients of what queries are projected to, and of what latents give to keys and values, or of the normed
  // latents that the rows gave to others; and of the shared keys.
  void add_attention() {
    const LayerContext& c = pass_.c;
    const Saved& saved = pass_.saved;
    const at::Tensor &grad_attended_RW = held_[declared_.grad_attended_RW],
                     &grad_rotated_q_RW = held_[declared_.grad_rotated_q_RW],
                     &sum_TK = held_[declared_.grad_rotary_key_sum_TK];
    const LayerAttention attention =
        pass_.attention(false, held_[declared_.rotated_q_RW], held_[declared_.rotated_k_TW], held_[declared_.value_TW]);
    KeysValues own = c.kv.gathered(c.layer);
    if (pass_.gives) {
      own = {held_[declared_.grad_normed_latent_TC], sum_TK};
    } else if (!c.kv.keeps(c.layer)) {
      own = {held_[declared_.grad_k_TW], held_[declared_.grad_v_TW]};
      c.ops.zero(own.k);
      c.ops.zero(own.v);
      c.kv.add_gathered(c.ops, c.layer, own);
    }
    c.kv.add_backward(attention, saved.attended_RW, saved.lse_HR, grad_attended_RW, grad_rotated_q_RW, own);
    c.ops.add_rotate_backward(pass_.rotation_of_queries(), saved.q_RW, grad_rotated_q_RW, held_[declared_.grad_q_RW],
                              at::Tensor());
    if (pass_.keeps) return;  // the same is done for all rows of the path
    if (!pass_.gives) c.ops.expand_heads_backward(own.k, own.v, held_[declared_.grad_kv_TW], sum_TK);
    c.ops.add_rotate_backward(pass_.rotation_of_keys(), saved.rotary_key_TK, sum_TK,
                              held_[declared_.grad_rotary_key_TK], at::Tensor());
  }

  // The gradient of the latents before their norm, through the norm and what they were projected to.
  void add_key_value_latents() {
    const LayerContext& c = pass_.c;
    const Latent weights = pass_.w.keys_values(), grads = pass_.grads->keys_values();
    const LatentSaved& saved = pass_.saved.latent;
    const at::Tensor &normed_TC = held_[declared_.latent_TC], &product = held_[declared_.kv_product],
                     &grad_latent_TC = held_[declared_.grad_latent_TC];
    if (pass_.gives)  // the source has done the rest
      return latent_norm_backward(c, weights, grads, saved, held_[declared_.grad_normed_latent_TC], grad_latent_TC);
    if (pass_.carries) add_expand_path_backward(c, grads.up, c.kv.path_rows_with_own(), product);
    if (!pass_.keeps)
      return add_latent_backward(c, weights, grads, saved, held_[declared_.grad_kv_TW], normed_TC, product,
                                 grad_latent_TC);
    const PathLatents own = c.kv.path_of_latents()->top_latents(c.layer);
    c.ops.add_rotate_backward(pass_.rotation_of_keys(), pass_.saved.rotary_key_TK, own.grad_rotary_PK,
                              held_[declared_.grad_rotary_key_TK], at::Tensor());
    c.ops.convert(own.grad_latent_PC, normed_TC);
    latent_norm_backward(c, weights, grads, saved, normed_TC, grad_latent_TC);
  }

  // The gradient of what queries are projected to from the rows: heads, or latents.
  at::Tensor add_query_latents() {
    if (pass_.s.query == 0) return held_[declared_.grad_q_RW];
    add_latent_backward(pass_.c, pass_.w.queries(), pass_.grads->queries(), pass_.saved.query_latent,
                        held_[declared_.grad_q_RW], held_[declared_.query_latent_RC], held_[declared_.query_product],
                        held_[declared_.grad_query_latent_RC]);
    return held_[declared_.grad_query_latent_RC];
  }

  const Pass pass_;
  const LatentBackwardBuffers declared_;
  HeldBuffers held_;
};

}  // namespace

extern const MixerLayer latent_attention_layer;
const MixerLayer latent_attention_layer{
    [](const LayerContext& c) {
      return SavedBuffers(c.arena, LatentSavedBuffers(latent_shape(c), c.block(), c.block_rows()), c.dtype());
    },
    [](const LayerContext& c, const LayerSaved& saved) -> std::unique_ptr<MixerForward> {
      return std::make_unique<Forward>(c, saved);
    },
    [](const LayerContext& c, const LayerSaved& saved, const PartViews& grads) -> std::unique_ptr<MixerBackward> {
      return std::make_unique<Backward>(c, saved, grads);
    }};

}  // namespace espalier
