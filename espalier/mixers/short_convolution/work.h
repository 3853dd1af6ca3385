// Buffers of a short convolution (device/buffers.h).
//
// T rows, R rows that continue, F states that are used within the set, N numbers of a state, W columns of a projected
// row, C channels, M width.
#pragma once

#include "espalier/mixers/short_convolution/shape.h"
#include "espalier/model/block_buffers.h"

namespace espalier {

struct ShortConvolutionSaved : BufferList {
  ShortConvolutionSaved(const ShortConvolutionShape& shape, const BlockShape& block, const BlockRows& rows);
  Place projected_TW, mixed_TC;
};

struct ShortConvolutionForwardBuffers : BufferList {
  enum class Stage { projection, rows, output };
  ShortConvolutionForwardBuffers(const ShortConvolution& mixer, const BlockShape& block, const BlockRows& rows,
                                 std::int64_t output_bytes);
  Place normed_TM, states_FN;
  Place mixed_RC;  // where the block is narrow
};

struct ShortConvolutionBackwardBuffers : BufferList {
  enum class Stage { mlp, output, rows, input };
  ShortConvolutionBackwardBuffers(const ShortConvolution& mixer, const BlockShape& block, const BlockRows& rows,
                                  Mixer::BlockBytes of_block);
  Place grad_mixed_TC;
  Place mixed_RC, grad_mixed_RC;  // where the block is narrow
  Place grad_projected_TW, states_FN, grad_states_FN;
  Place normed_TM, projected_product;
};

}  // namespace espalier
