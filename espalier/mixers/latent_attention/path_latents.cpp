#include "espalier/mixers/latent_attention/path_latents.h"

#include <algorithm>

namespace espalier {
namespace {

// Calls visit(begin, count) for blocks of the rows.
void for_each_block(const LatentBlock& block, std::int64_t rows, auto&& visit) {
  const std::int64_t most = block.kv_BW.size(0);
  for (std::int64_t begin = 0; begin < rows; begin += most) visit(begin, std::min(most, rows - begin));
}

}  // namespace

void expand_rows(const LayerContext& c, const LatentBlock& block, const PathLatents& carried,
                 const PathHeads& expanded) {
  for_each_block(block, carried.latent_PC.size(0), [&](std::int64_t begin, std::int64_t count) {
    const at::Tensor kv_BW = block.kv_BW.narrow(0, 0, count);
    c.products.linear(kv_BW, carried.latent_PC.narrow(0, begin, count), LatentViews(c.weights.mixer).key_value);
    c.ops.expand_heads(kv_BW, carried.rotary_PK.narrow(0, begin, count), expanded.k.narrow(0, begin, count),
                       expanded.v.narrow(0, begin, count));
  });
}

void add_expand_rows_backward(const LayerContext& c, const Projection& grad_up, const LatentBlock& block,
                              const PathHeads& expanded, const PathLatents& carried, const at::Tensor& product_NC) {
  const auto add = [&](const at::Tensor& sum, const at::Tensor& x) { c.ops.add_scaled(sum, x, 1, sum); };
  for_each_block(block, carried.latent_PC.size(0), [&](std::int64_t begin, std::int64_t count) {
    const auto part = [&](const at::Tensor& of_rows) { return of_rows.narrow(0, begin, count); };
    const auto room = [&](const at::Tensor& of_block) { return of_block.narrow(0, 0, count); };
    const at::Tensor grad_kv_BW = room(block.kv_BW), grad_latent_BC = room(block.grad_latent_BC),
                     sum_latent_BC = room(block.sum_latent_BC), sum_rotary_BK = room(block.sum_rotary_BK);
    c.ops.expand_heads_backward(part(expanded.grad_k), part(expanded.grad_v), grad_kv_BW, sum_rotary_BK);
    add(part(carried.grad_rotary_PK), sum_rotary_BK);
    c.products.add_linear_grad_weight(grad_up, LatentViews(c.weights.mixer).key_value, grad_kv_BW,
                                      part(carried.latent_PC), product_NC);
    c.products.linear_grad_input(grad_latent_BC, grad_kv_BW, LatentViews(c.weights.mixer).key_value);
    c.ops.convert(grad_latent_BC, sum_latent_BC);
    add(part(carried.grad_latent_PC), sum_latent_BC);
  });
}

void expand_path(const LayerContext& c, std::int64_t rows) {
  OpenPath& path = *c.kv.path_of_latents();
  if (path.room_holds(c.layer, rows)) return;
  expand_rows(c, path.latent_block(), path.latents(c.layer, rows), path.path(c.layer, rows));
  path.filled_room(c.layer, rows);
}

void zero_expanded_gradients(const LayerContext& c, std::int64_t rows) {
  if (rows == 0) return;
  const PathHeads expanded = c.kv.path_of_latents()->path(c.layer, rows);
  c.ops.zero(expanded.grad_k);
  c.ops.zero(expanded.grad_v);
}

void keep_latents(const LayerContext& c, const LatentSaved& latent, const at::Tensor& rotary_key_TK) {
  OpenPath& path = *c.kv.path_of_latents();
  const PathLatents own = path.top_latents(c.layer);
  c.ops.norm_again(latent.latent_RC, LatentViews(c.weights.mixer).key_value_norm_C, latent.rstd_R, own.latent_PC);
  c.ops.convert(rotary_key_TK, own.rotary_PK);
  path.filled_room(c.layer, path.rows());
}

void add_expand_path_backward(const LayerContext& c, const Projection& grad_up, std::int64_t rows,
                              const at::Tensor& product_NC) {
  const OpenPath& path = *c.kv.path_of_latents();
  add_expand_rows_backward(c, grad_up, path.latent_block(), path.path(c.layer, rows), path.latents(c.layer, rows),
                           product_NC);
}

}  // namespace espalier
