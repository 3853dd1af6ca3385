// A short convolution between two gates on a device: equations and shapes in ops/short_convolution.h. T is float,
// double or bfloat16, A = accumulator_t<T>.
#pragma once

#include <cstdint>

#include "espalier/base/dtype.h"
#include "espalier/ops/cuda/delta_rule.h"

namespace espalier::cuda {

// Parts of the rows, at most, that have sums of the weights' gradients of their own; and the most rows of a
// convolution: a block of them has a warp for each and one for the bias.
inline constexpr std::int64_t kConvolutionParts = 64, kLongestShortConvolution = 31;

// conv_bias_C null: none.
template <class T>
struct ShortConvolutionRows {
  std::int64_t channels = 0, kernel = 0;
  const T *projected_TW = nullptr, *conv_CK = nullptr, *conv_bias_C = nullptr;
};
template <class A>
struct ShortConvolutionSums {
  A *conv_CK = nullptr, *conv_bias_C = nullptr;
};

// For runs that do not follow each other. Overwrites y_TC (null: not computed) and the runs' end states.
template <class T>
void short_convolution(const ShortConvolutionRows<T>& rows, const DeltaRuns<accumulator_t<T>>& runs, T* y_TC);
// For runs that do not follow each other. Overwrites grad_projected, and adds to the runs' grad_start and to sums,
// whose members may be null.
template <class T>
void add_short_convolution_backward(const ShortConvolutionRows<T>& rows, const DeltaRuns<accumulator_t<T>>& runs,
                                    const T* grad_y_TC, T* grad_projected_TW,
                                    const ShortConvolutionSums<accumulator_t<T>>& sums);

}  // namespace espalier::cuda
