// Keys and values of the path's rows from the latents that the path carries, and their gradients back to those.
//
//   kv_p = latent_p up^T,  k_ph = (kv_ph[0, N), rotary_p),  v_ph = kv_ph[N, N + Dv)          (ops/latent.h)
//
// A row of the path then takes C + K numbers in each layer in place of J (D + Dv), and keys and values stand in memory
// for the layer in use alone. Gradients are sums over everything below, in the accumulator dtype. Where sums have a
// defined order (base/defined_sums.h), keys and values are bitwise identical to the rows' own forward.
//
// Shapes: P rows of the path, T rows of a set, J key/value heads, D and Dv sizes of a key and of a value, N channels of
// a key without rotation, C width of the latent, K rotated channels.
#pragma once

#include "espalier/mixers/latent_attention/latent.h"
#include "espalier/model/open_path.h"

namespace espalier {

// True if the source's path carries latents.
inline bool carries_latents(const LayerContext& context) { return context.kv.path_of_latents() != nullptr; }

// Overwrites keys and values of rows with those that their latents expand to, in blocks.
void expand_rows(const LayerContext& context, const LatentBlock& block, const PathLatents& rows,
                 const PathHeads& expanded);
// From the gradients of these keys and values: adds to the gradients of the latents and shared keys, and to grad_up.
// product_NC: scratch as in add_linear_grad_weight.
void add_expand_rows_backward(const LayerContext& context, const Projection& grad_up, const LatentBlock& block,
                              const PathHeads& expanded, const PathLatents& rows, const at::Tensor& product_NC);

// Overwrites the keys and values of the path's first `rows` rows in this layer, unless the room has them.
void expand_path(const LayerContext& context, std::int64_t rows);
// Sets the gradients of these keys and values to 0.
void zero_expanded_gradients(const LayerContext& context, std::int64_t rows);
// Keeps the latents of a trunk's own rows, whose keys and values are written to the room.
void keep_latents(const LayerContext& context, const LatentSaved& latent, const at::Tensor& rotary_key_TK);
// add_expand_rows_backward of the path's first `rows` rows.
void add_expand_path_backward(const LayerContext& context, const Projection& grad_up, std::int64_t rows,
                              const at::Tensor& product_NC);

}  // namespace espalier
