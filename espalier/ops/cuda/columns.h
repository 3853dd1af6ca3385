// Column sums of a matrix, in an order that depends on its shape only; biases.
#pragma once

#include <cstdint>

#include "espalier/base/dtype.h"

namespace espalier::cuda {

// into_m += sum_p part[p, m], p in order of eight interleaved sums.
template <class S, class Out>
void add_parts(std::int64_t parts, std::int64_t width, const S* part, Out* into);

// into_m += sum_r factor_r x_rm (factor null: 1), summed in type S.
template <class S, class T, class Out>
void add_column_sums(std::int64_t rows, std::int64_t width, const T* x, std::int64_t stride, const double* factor,
                     Out* into);

// y_r += bias, in place; contiguous.
template <class T>
void add_bias(std::int64_t rows, std::int64_t width, const T* bias, T* y);

}  // namespace espalier::cuda
