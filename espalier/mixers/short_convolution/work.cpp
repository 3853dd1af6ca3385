#include "espalier/mixers/short_convolution/work.h"

#include <algorithm>

namespace espalier {
namespace {

constexpr Element kActivation = Element::activation, kAccumulator = Element::accumulator;

bool adapts_rows(const BlockShape& b) { return b.layer.adapted_alike.of_mixer(ShortConvolution::input); }

}  // namespace

ShortConvolutionSaved::ShortConvolutionSaved(const ShortConvolutionShape& s, const BlockShape& b, const BlockRows& rows)
    : BufferList(b.bytes) {
  projected_TW = add("projected rows", rows.all, s.projected());
  mixed_TC = add("mixed rows", rows.all, s.channels);
}

ShortConvolutionForwardBuffers::ShortConvolutionForwardBuffers(const ShortConvolution& mixer, const BlockShape& b,
                                                               const BlockRows& rows, std::int64_t output_bytes)
    : BufferList(b.bytes) {
  const std::int64_t T = rows.all;
  if (b.layer.has_norms_before()) normed_TM = add("normalised rows", T, b.shape.hidden, kActivation, Stage::projection);
  states_FN = add("states at forks", rows.states, mixer.state(), kAccumulator, Stage::rows);
  if (rows.narrow)
    mixed_RC = add("mixed rows of outputs", rows.continuing, mixer.shape.channels, kActivation, Stage::output);
  if (adapts_rows(b)) nest(Stage::projection, low_rank_bytes(b, T));
  nest(Stage::output, output_bytes);
}

ShortConvolutionBackwardBuffers::ShortConvolutionBackwardBuffers(const ShortConvolution& mixer, const BlockShape& b,
                                                                 const BlockRows& rows, Mixer::BlockBytes of_block)
    : BufferList(b.bytes) {
  const ShortConvolutionShape& s = mixer.shape;
  const std::int64_t T = rows.all, R = rows.continuing, M = b.shape.hidden, C = s.channels;
  grad_mixed_TC = add("gradient of mixed rows", T, C, kActivation, Stage::mlp, Stage::input);
  nest(Stage::mlp, of_block.mlp);
  if (rows.narrow) mixed_RC = add("mixed rows of outputs", R, C, kActivation, Stage::output);
  if (rows.narrow) grad_mixed_RC = add("gradient of mixed rows of outputs", R, C, kActivation, Stage::output);
  nest(Stage::output, of_block.output);
  grad_projected_TW = add("gradient of projected rows", T, s.projected(), kActivation, Stage::rows, Stage::input);
  states_FN = add("states at forks", rows.states, s.state(), kAccumulator, Stage::rows);
  grad_states_FN = add("gradients of states at forks", rows.states, s.state(), kAccumulator, Stage::rows);
  normed_TM = add("normalised rows", T, M, kActivation, Stage::input);
  projected_product = add_product(*this, b, "product for projected rows", s.projected(), M, Stage::input);
  if (adapts_rows(b)) nest(Stage::input, low_rank_bytes(b, T));
}

std::int64_t ShortConvolution::saved_bytes(const BlockShape& block, const BlockRows& rows) const {
  return ShortConvolutionSaved(shape, block, rows).peak();
}
std::int64_t ShortConvolution::forward_bytes(const BlockShape& block, const BlockRows& rows,
                                             BlockBytes of_block) const {
  return ShortConvolutionForwardBuffers(*this, block, rows, of_block.output).peak();
}
std::int64_t ShortConvolution::backward_bytes(const BlockShape& block, const BlockRows& rows,
                                              BlockBytes of_block) const {
  return ShortConvolutionBackwardBuffers(*this, block, rows, of_block).peak();
}

// Forward: both gates and a product for each row of the kernel. Backward: the convolution again, its gradients by
// inputs and by weights, and four products of gates.
MixerFlops ShortConvolution::flops() const {
  const auto C = static_cast<double>(shape.channels), K = static_cast<double>(shape.kernel);
  const double row = C * (2 * K + 2);
  return {.row = row, .row_backward = C * (6 * K + 6) / row};
}

// A row reads its three parts and leaves one.
MixerTraffic ShortConvolution::traffic() const { return {4 * static_cast<double>(shape.channels), 1}; }

// Sums of parts of at least 64 rows, of the convolution and the bias.
GpuScratch ShortConvolution::gpu_scratch(const ScratchRows& rows) const {
  if (!rows.gradients) return {};
  constexpr std::int64_t kLeastRows = 64;
  const std::int64_t parts = std::min(kGpuConvolutionParts, (rows.rows + kLeastRows - 1) / kLeastRows);
  return {parts * shape.channels * (shape.kernel + 1) * element_bytes(rows.dtype).accumulator, 0};
}

std::int64_t ShortConvolution::cpu_scratch(const ScratchRows& rows) const {
  return rows.threads * element_bytes(rows.dtype).accumulator * 2 * convolution_scratch(shape.kernel);
}

}  // namespace espalier
