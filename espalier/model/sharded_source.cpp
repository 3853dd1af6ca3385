#include "espalier/model/sharded_source.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "espalier/device/held_buffers.h"
#include "espalier/model/sharded_buffers.h"

namespace espalier {

ShardedSource::ShardedSource(OpenPath& path, std::int64_t path_rows, bool is_trunk, at::Tensor subtree_end_S,
                             at::Tensor depth_S, const RowShares& shares, const ShardedRows& rows,
                             const BufferSizes& sizes, at::ScalarType dtype, Group& cp, Arena& arena,
                             std::optional<SharedStates> states)
    : path_(path),
      path_rows_(path_rows),
      is_trunk_(is_trunk),
      subtree_end_S_(std::move(subtree_end_S)),
      depth_S_(std::move(depth_S)),
      shares_(shares),
      rows_(rows),
      sizes_(sizes),
      dtype_(dtype),
      cp_(cp),
      arena_(arena),
      states_(std::move(states)) {}

KeysValues ShardedSource::parts_of(const LayerAttention& a, const at::Tensor& whole, std::int64_t place,
                                   std::int64_t rows) const {
  const Mixer& mixer = sizes_.shape.mixer(a.layer);
  const std::vector<PathKind> given = mixer.path_kinds(mixer.narrows_path());
  const std::int64_t most = shares_.most(), K = given[0].width, V = given[1].width;
  const at::Tensor flat = whole.view({-1}).narrow(0, place * most * (K + V), most * (K + V));
  return {flat.narrow(0, 0, rows * K).view({rows, K}), flat.narrow(0, most * K, rows * V).view({rows, V})};
}

at::Tensor ShardedSource::set_rows_of(std::int64_t rank) const {
  std::int64_t before = 0;
  for (std::int64_t other = 0; other < rank; ++other) before += shares_.rows_of(other);
  return rows_.row_S.narrow(0, before, shares_.rows_of(rank));
}

void ShardedSource::give_own(const LayerAttention& a, const KeysValues& given) const {
  if (a.latents == nullptr) {
    a.ops.convert(a.own.k, given.k);
    a.ops.convert(a.own.v, given.v);
    return;
  }
  a.latents->give(given);
}

// A rank with fewer rows than others has rows of padding behind them, which are never read.
void ShardedSource::gather(const LayerAttention& a, const at::Tensor& part, const at::Tensor& whole,
                           const KeysValues& set) const {
  give_own(a, parts_of(a, part, 0, shares_.rows_of(cp_.rank())));
  cp_.gather(part, whole);
  for (std::int64_t rank = 0; rank < shares_.ranks(); ++rank) {
    const KeysValues of_rank = parts_of(a, whole, rank, shares_.rows_of(rank));
    a.ops.scatter(of_rank.k, set_rows_of(rank), set.k);
    a.ops.scatter(of_rank.v, set_rows_of(rank), set.v);
  }
}

OpenPath::Latents ShardedSource::latents_of_set(const LayerAttention& a, const at::Tensor& latent_SC,
                                                const at::Tensor& rotary_SK) const {
  if (is_trunk_ && path_.carries_latents()) return path_.top_latents(a.layer);
  return {latent_SC.narrow(0, 0, shares_.rows()), rotary_SK.narrow(0, 0, shares_.rows()), {}, {}};
}

void ShardedSource::give_to_owners(const LayerAttention& a, const KeysValues& grad_set, const at::Tensor& part,
                                   const at::Tensor& whole, const KeysValues& grad_own) const {
  a.ops.zero(whole);
  for (std::int64_t rank = 0; rank < shares_.ranks(); ++rank) {
    const KeysValues of_rank = parts_of(a, whole, rank, shares_.rows_of(rank));
    a.ops.gather(grad_set.k, set_rows_of(rank), of_rank.k);
    a.ops.gather(grad_set.v, set_rows_of(rank), of_rank.v);
  }
  cp_.scatter_sum(whole, part);
  const KeysValues own = parts_of(a, part, 0, shares_.rows_of(cp_.rank()));
  if (a.latents != nullptr) {
    a.ops.convert(own.k, grad_own.k);
    a.ops.convert(own.v, grad_own.v);
  } else {
    a.ops.add_scatter(own.k, rows_.counted_T, grad_own.k);
    a.ops.add_scatter(own.v, rows_.counted_T, grad_own.v);
  }
}

AttentionProblem ShardedSource::problem(const LayerAttention& a, const KeysValues& set,
                                        const OpenPath::Layer& path) const {
  const at::Tensor& query_row = a.output_row_R.defined() ? rows_.output_own_O : rows_.own_T;
  return {a.head_dim, a.q_RW,         set.k,    set.v,    path.k,  path.v,
          query_row,  subtree_end_S_, a.window, depth_S_, a.scale, a.soft_cap};
}

void ShardedSource::attend(const LayerAttention& a, const at::Tensor& attended_RW, const at::Tensor& lse_HR) {
  using Stage = ShardedForwardBuffers::Stage;
  const ShardedForwardBuffers declared(block(a), shares_, is_trunk_);
  HeldBuffers held(arena_, declared, dtype_);
  held.enter(Stage::exchange);
  KeysValues set{held[declared.k_SW], held[declared.v_SW]};
  if (is_trunk_) set = {path_.top(a.layer).k.flatten(1), path_.top(a.layer).v.flatten(1)};
  const bool kept = is_trunk_ && a.layer < kept_layers_;  // a recomputation finds them in the path
  if (a.latents == nullptr) {
    if (!kept) gather(a, held[declared.part], held[declared.whole], set);
  } else {
    const OpenPath::Latents latents = latents_of_set(a, held[declared.latent_SC], held[declared.rotary_SK]);
    if (!kept) gather(a, held[declared.part], held[declared.whole], {latents.latent_PC, latents.rotary_PK});
    held.enter(Stage::expansion);
    const bool in_room = is_trunk_ && path_.carries_latents();
    if (in_room ? !kept || !path_.room_holds(a.layer, path_.rows()) : !kept)
      a.latents->expand({held[declared.kv_BW], {}, {}, {}}, latents, {set.k, set.v, {}, {}});
    if (in_room) path_.filled_room(a.layer, path_.rows());
  }
  if (is_trunk_) kept_layers_ = std::max(kept_layers_, a.layer + 1);
  held.enter(Stage::attention);
  if (a.q_RW.size(0) == 0) return;
  const TimedPart timed(a.timer, part::kAttention);
  a.ops.attention(problem(a, set, path_.path(a.layer, path_rows_)), attended_RW, lse_HR);
}

void ShardedSource::add_backward(const LayerAttention& a, const at::Tensor& attended_RW, const at::Tensor& lse_HR,
                                 const at::Tensor& grad_attended_RW, const at::Tensor& grad_q_RW,
                                 const KeysValues& grad_own) {
  using Stage = ShardedBackwardBuffers::Stage;
  const ShardedBackwardBuffers declared(block(a), shares_, is_trunk_);
  HeldBuffers held(arena_, declared, dtype_);
  held.enter(Stage::exchange);
  KeysValues set{held[declared.k_SW], held[declared.v_SW]}, grad{held[declared.grad_k_SW], held[declared.grad_v_SW]};
  OpenPath::Latents latents;
  if (a.latents != nullptr) {
    latents = latents_of_set(a, held[declared.latent_SC], held[declared.rotary_SK]);
    if (!latents.grad_latent_PC.defined()) {
      gather(a, held[declared.part], held[declared.whole], {latents.latent_PC, latents.rotary_PK});
      latents.grad_latent_PC = held[declared.sum_latent_SC].narrow(0, 0, shares_.rows());
      latents.grad_rotary_PK = held[declared.sum_rotary_SK].narrow(0, 0, shares_.rows());
      a.ops.zero(latents.grad_latent_PC);
      a.ops.zero(latents.grad_rotary_PK);
    }
  }
  if (is_trunk_) {
    path_.expect_complete(a.layer);
    const OpenPath::Layer own = path_.top(a.layer);
    set = {own.k.flatten(1), own.v.flatten(1)};
    grad = {own.grad_k.flatten(1), own.grad_v.flatten(1)};
  } else {
    if (a.latents == nullptr) {
      gather(a, held[declared.part], held[declared.whole], set);
    } else {
      held.enter(Stage::expansion);
      a.latents->expand({held[declared.kv_BW], {}, {}, {}}, latents, {set.k, set.v, {}, {}});
    }
    a.ops.zero(grad.k);
    a.ops.zero(grad.v);
  }
  held.enter(Stage::attention);
  const OpenPath::Layer path = path_.path(a.layer, path_rows_);
  if (a.q_RW.size(0) > 0) {
    const TimedPart timed(a.timer, part::kAttention);
    a.ops.add_attention_backward(problem(a, set, path), attended_RW, lse_HR, grad_attended_RW,
                                 {grad_q_RW, grad.k, grad.v, path.grad_k, path.grad_v});
  }
  if (a.latents != nullptr) {
    held.enter(Stage::latents);
    const at::Tensor& product = held[declared.product];
    if (path_.carries_latents()) a.latents->add_expand_path_backward(path_rows_with_own(), product);
    if (!(is_trunk_ && path_.carries_latents()))
      a.latents->add_expand_backward({held[declared.grad_kv_BW], held[declared.grad_latent_BC],
                                      held[declared.sum_latent_BC], held[declared.sum_rotary_BK]},
                                     {{}, {}, grad.k, grad.v}, latents, product);
    grad = {latents.grad_latent_PC, latents.grad_rotary_PK};
  }
  held.enter(Stage::owners);
  give_to_owners(a, grad, held[declared.grad_part], held[declared.grad_whole], grad_own);
  path_.count_contribution(a.layer, path_rows_);
}

}  // namespace espalier
