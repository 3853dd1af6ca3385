// Operations and scratch of short convolutions.
#include <algorithm>

#include "espalier/device/buffers.h"
#include "espalier/mixers/short_convolution/shape.h"

namespace espalier {

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
