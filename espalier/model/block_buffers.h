// Buffers of a block, of the path and of a pass (device/buffers.h), declared for the code of this folder and for the
// forecast. The buffers of mixers are declared in their folders.
//
// T rows, R rows that continue past the mixer, O output rows, P path rows, M width. A block does not declare members
// that it does not need. Members are named by their shape; W is a width of several parts.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "espalier/device/buffers.h"
#include "espalier/shape/model_shape.h"

namespace espalier {

// Sizes common to the buffers of a run.
struct BufferSizes {
  const ModelShape& shape;
  ElementBytes bytes;
  bool rounds_weight_gradients;  // a product is rounded in its own tensor before it is added (ops/products.h)
};

// Sizes common to the buffers of a layer.
struct BlockShape : BufferSizes {
  BlockShape(const BufferSizes& sizes, const LayerShape& of_layer) : BufferSizes(sizes), layer(of_layer) {}

  const LayerShape& layer;

  // True if half a block changes its last product before adding it to the stream.
  bool finishes_branch() const { return layer.has_norms_after() || shape.scales.residual != 1; }
};

// The rows of one layer.
struct BlockRows {
  std::int64_t all = 0, continuing = 0;  // T, R
  bool narrow = false;                   // only output rows continue
  bool in_path = false;                  // what the rows leave, and its gradients, are in the path
  std::int64_t ranks = 1;                // ranks of cp; each has at most these rows of a sharded trunk
  std::int64_t states = 0;               // recurrent ones that are used within the set
  bool sharded = false;                  // a set sharded over cp, where `ranks` does not say so

  bool is_sharded() const { return sharded || ranks > 1; }
};

// The gradient of a weight [outputs, inputs] before it is added, where it is rounded first.
template <class Stage>
BufferList::Place add_product(BufferList& list, const BufferSizes& sizes, std::string_view name, std::int64_t outputs,
                              std::int64_t inputs, Stage stage) {
  return sizes.rounds_weight_gradients ? list.add(name, outputs, inputs, Element::activation, stage)
                                       : BufferList::Place{};
}
// The scratch of an adapted product (ops/low_rank.h): x A^T, or the gradient of it, one at a time (model/products.h).
// The width of its rows, and its bytes.
std::int64_t low_rank_width(const ModelShape& shape);
std::int64_t low_rank_bytes(const BufferSizes& sizes, std::int64_t rows);

// The states that a trunk leaves for everything below it, of all recurrent layers end to end, and the sums of their
// gradients; N numbers (Mixer::state).
struct StateBuffers : BufferList {
  StateBuffers(const BufferSizes& sizes, bool with_gradients);
  Place states_N, grad_states_N;
};

// One layer of the path, with its accumulators: by Mixer::path_kinds, all kinds, then the gradients of all.
struct PathBuffers : BufferList {
  PathBuffers(const BlockShape& block, std::int64_t rows, bool with_gradients, bool latents = false);
  std::vector<Place> rows_PW;
};

// Rows of latents that are expanded to keys and values at once.
inline constexpr std::int64_t kLatentBlock = 1024;

// For all layers of a path of latents together: a room for keys and values of the layer in use, with buffers for blocks
// of B rows.
struct PathRoomBuffers : BufferList {
  PathRoomBuffers(const BlockShape& block, std::int64_t rows, bool with_gradients);
  Place k_PW, v_PW, grad_k_PW, grad_v_PW, kv_BW;
  Place grad_latent_BC, sum_latent_BC, sum_rotary_BK;  // the sums in the accumulator dtype
};

// The input of a layer, or of the final norm.
struct StreamBuffer : BufferList {
  StreamBuffer(const BufferSizes& sizes, std::int64_t rows);
  Place stream_TM;
};

// Buffers that an item holds from its forward to the end of its backward, besides its layers' buffers.
struct ItemBuffers : BufferList {
  ItemBuffers(const BufferSizes& sizes, std::int64_t outputs, bool with_gradients);
  Place grad_normed_OM, final_stream_OM, normed_OM, final_rstd_O;
};

// Keys and values of a set's rows that later layers read, which an item holds to the end of its backward; or the sums
// of their gradients, in a backward.
struct ReadLaterBuffers : BufferList {
  explicit ReadLaterBuffers(const BlockShape& block, std::int64_t rows, bool gradients);
  Place k_TW, v_TW;
};

// Inputs of all layers (model/layer_inputs.h), W = L P wide: with the embedded rows, or their gradients.
struct LayerInputBuffers : BufferList {
  LayerInputBuffers(const BufferSizes& sizes, std::int64_t rows);
  Place inputs_TW, embedded_TM;
};
struct LayerInputGradients : BufferList {
  LayerInputGradients(const BufferSizes& sizes, std::int64_t rows);
  Place grad_inputs_TW;
};
// While they are computed, and in their backward.
struct LookUpBuffers : BufferList {
  LookUpBuffers(const BufferSizes& sizes, std::int64_t rows, bool backward);
  Place context_TW, looked_up_TW, rstd_N;  // N = T L
  Place normed_TW, grad_context_TW, product_WM;
};

// Buffers of an item's backward, below the layers' own buffers.
struct DecoderBackwardBuffers : BufferList {
  DecoderBackwardBuffers(const BufferSizes& sizes, std::int64_t rows, std::int64_t outputs);
  Place grad_stream_OM, grad_stream_TM;
};

// Buffers that a layer saves for its backward around its mixer, besides its input.
struct MixerHalfSaved : BufferList {
  MixerHalfSaved(const BlockShape& block, const BlockRows& rows);
  Place norm_rstd_T, stream_mid_RM;
  Place branch_RM, branch_rstd_R;  // input of the norm after the mixer
};

// Around the last product of a mixer: forward and backward.
struct MixerOutputBuffers : BufferList {
  MixerOutputBuffers(const BlockShape& block, const BlockRows& rows);
  Place residual_RM;  // where the block is narrow
  Place branch_RM;    // the addition to the stream, if it is more than a product
};
struct MixerOutputBackwardBuffers : BufferList {
  // `width`: of what the product reads.
  MixerOutputBackwardBuffers(const BlockShape& block, const BlockRows& rows, std::int64_t width);
  Place grad_branch_RM, output_product;
};

// The peak bytes of a layer's forward and backward. Without output (recomputation) a forward stops before its last
// product, or before the norm behind it.
std::int64_t layer_forward_bytes(const BlockShape& block, const BlockRows& rows, bool with_output);
std::int64_t layer_backward_bytes(const BlockShape& block, const BlockRows& rows);

}  // namespace espalier
