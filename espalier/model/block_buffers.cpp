#include "espalier/model/block_buffers.h"

#include <algorithm>

#include "espalier/model/mlp_buffers.h"

namespace espalier {
namespace {

constexpr Element kActivation = Element::activation, kAccumulator = Element::accumulator;

// Columns of the inputs of all layers.
std::int64_t inputs_width(const ModelShape& shape) { return shape.layers() * shape.layer_inputs.width; }

// A mixer's last product.
bool adapts_output(const BlockShape& b) { return b.layer.adapted_alike.of_mixer(b.layer.mixer->output_product()); }

}  // namespace

std::int64_t low_rank_width(const ModelShape& shape) { return shape.trained.added.rank; }
std::int64_t low_rank_bytes(const BufferSizes& sizes, std::int64_t rows) {
  return arena_bytes(rows * low_rank_width(sizes.shape) * sizes.bytes.activation);
}

StateBuffers::StateBuffers(const BufferSizes& sizes, bool with_gradients) : BufferList(sizes.bytes) {
  const std::int64_t N = sizes.shape.states();
  if (N == 0) return;
  states_N = add("states", N, Buffer::kVector, kAccumulator);
  if (with_gradients) grad_states_N = add("gradients of states", N, Buffer::kVector, kAccumulator);
}

PathBuffers::PathBuffers(const BlockShape& b, std::int64_t rows, bool with_gradients, bool latents)
    : BufferList(b.bytes) {
  const std::vector<PathKind> kinds = b.layer.mixer->path_kinds(latents);
  for (const PathKind& kind : kinds) rows_PW.push_back(add(kind.name, rows, kind.width));
  if (!with_gradients) return;
  for (const PathKind& kind : kinds) rows_PW.push_back(add(kind.gradient_name, rows, kind.width, kAccumulator));
}

PathRoomBuffers::PathRoomBuffers(const BlockShape& b, std::int64_t rows, bool with_gradients) : BufferList(b.bytes) {
  const Mixer& mixer = *b.layer.mixer;
  const std::vector<PathKind> heads = mixer.path_kinds(false), latents = mixer.path_kinds(true);
  const std::int64_t block = std::min(rows, kLatentBlock);
  k_PW = add("keys", rows, heads[0].width);
  v_PW = add("values", rows, heads[1].width);
  kv_BW = add("heads of a block of the path", block, mixer.expanded_width());
  if (mixer.adapts_expansion(b.layer.adapted_alike)) nest(0, low_rank_bytes(b, block));
  if (!with_gradients) return;
  grad_k_PW = add("gradients of keys", rows, heads[0].width, kAccumulator);
  grad_v_PW = add("gradients of values", rows, heads[1].width, kAccumulator);
  grad_latent_BC = add("gradients of latents of a block", block, latents[0].width);
  sum_latent_BC = add("sums for latents of a block", block, latents[0].width, kAccumulator);
  sum_rotary_BK = add("sums for shared keys of a block", block, latents[1].width, kAccumulator);
}

StreamBuffer::StreamBuffer(const BufferSizes& sizes, std::int64_t rows) : BufferList(sizes.bytes) {
  stream_TM = add("stream", rows, sizes.shape.hidden);
}

ItemBuffers::ItemBuffers(const BufferSizes& sizes, std::int64_t outputs, bool with_gradients)
    : BufferList(sizes.bytes) {
  const std::int64_t M = sizes.shape.hidden;
  if (with_gradients) grad_normed_OM = add("gradient of normalised outputs", outputs, M);
  final_stream_OM = add("final stream", outputs, M);
  normed_OM = add("normalised outputs", outputs, M);
  final_rstd_O = add("1/rms of outputs", outputs, Buffer::kVector, kAccumulator);
}

ReadLaterBuffers::ReadLaterBuffers(const BlockShape& b, std::int64_t rows, bool gradients) : BufferList(b.bytes) {
  const std::vector<PathKind> kinds = b.layer.mixer->path_kinds(false);
  const Element element = gradients ? kAccumulator : kActivation;
  const auto name = [&](std::size_t kind) { return gradients ? kinds[kind].gradient_name : kinds[kind].name; };
  k_TW = add(name(0), rows, kinds[0].width, element);
  v_TW = add(name(1), rows, kinds[1].width, element);
}

LayerInputBuffers::LayerInputBuffers(const BufferSizes& sizes, std::int64_t rows) : BufferList(sizes.bytes) {
  if (sizes.shape.layer_inputs.width == 0) return;
  inputs_TW = add("inputs of layers", rows, inputs_width(sizes.shape));
  embedded_TM = add("embedded rows", rows, sizes.shape.hidden);
}

LayerInputGradients::LayerInputGradients(const BufferSizes& sizes, std::int64_t rows) : BufferList(sizes.bytes) {
  if (sizes.shape.layer_inputs.width > 0)
    grad_inputs_TW = add("gradients of inputs of layers", rows, inputs_width(sizes.shape));
}

LookUpBuffers::LookUpBuffers(const BufferSizes& sizes, std::int64_t rows, bool backward) : BufferList(sizes.bytes) {
  const std::int64_t W = inputs_width(sizes.shape);
  if (W == 0) return;
  context_TW = add("product of embedded rows", rows, W);
  looked_up_TW = add("rows of the table of layers", rows, W);
  rstd_N = add("1/rms of layers' parts", rows * sizes.shape.layers(), Buffer::kVector, kAccumulator);
  if (sizes.shape.trained.added.layer_inputs) nest(0, low_rank_bytes(sizes, rows));
  if (!backward) return;
  normed_TW = add("normalised product", rows, W);
  grad_context_TW = add("gradient of the product", rows, W);
  product_WM = add_product(*this, sizes, "product for layers' inputs", W, sizes.shape.hidden, 0);
}

DecoderBackwardBuffers::DecoderBackwardBuffers(const BufferSizes& sizes, std::int64_t rows, std::int64_t outputs)
    : BufferList(sizes.bytes) {
  grad_stream_OM = add("gradient of the final stream", outputs, sizes.shape.hidden);
  grad_stream_TM = add("gradient of the stream", rows, sizes.shape.hidden);
}

MixerHalfSaved::MixerHalfSaved(const BlockShape& b, const BlockRows& rows) : BufferList(b.bytes) {
  const std::int64_t R = rows.continuing;
  if (b.layer.has_norms_before()) norm_rstd_T = add("1/rms of inputs", rows.all, Buffer::kVector, kAccumulator);
  stream_mid_RM = add("stream after the mixer", R, b.shape.hidden);
  if (!b.layer.has_norms_after()) return;
  branch_RM = add("output of the mixer", R, b.shape.hidden);
  branch_rstd_R = add("1/rms of the mixer's output", R, Buffer::kVector, kAccumulator);
}

MixerOutputBuffers::MixerOutputBuffers(const BlockShape& b, const BlockRows& rows) : BufferList(b.bytes) {
  const std::int64_t R = rows.continuing;
  if (rows.narrow) residual_RM = add("stream of outputs", R, b.shape.hidden);
  if (b.finishes_branch()) branch_RM = add("addition to the stream", R, b.shape.hidden);
  if (adapts_output(b)) nest(0, low_rank_bytes(b, R));
}

MixerOutputBackwardBuffers::MixerOutputBackwardBuffers(const BlockShape& b, const BlockRows& rows, std::int64_t width)
    : BufferList(b.bytes) {
  const std::int64_t R = rows.continuing, M = b.shape.hidden;
  if (R > 0 && b.finishes_branch()) grad_branch_RM = add("gradient of the mixer's output", R, M, kActivation);
  if (R > 0) output_product = add_product(*this, b, "product for the output", M, width, 0);
  if (adapts_output(b)) nest(0, low_rank_bytes(b, R));
}

std::int64_t layer_forward_bytes(const BlockShape& b, const BlockRows& rows, bool with_output) {
  const std::int64_t output = MixerOutputBuffers(b, rows).peak();
  return std::max(b.layer.mixer->forward_bytes(b, rows, {0, output}), mlp_forward_bytes(b, rows, with_output));
}

std::int64_t layer_backward_bytes(const BlockShape& b, const BlockRows& rows) {
  const std::int64_t output = MixerOutputBackwardBuffers(b, rows, b.layer.mixer->mixed_width()).peak();
  return b.layer.mixer->backward_bytes(b, rows, {mlp_backward_bytes(b, rows), output});
}

}  // namespace espalier
