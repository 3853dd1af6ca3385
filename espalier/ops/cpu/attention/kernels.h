// Entry points of each instruction set for dispatch.cpp: one table per element type.
//
// The kernels own no memory: the caller passes `scratch` of the required size, aligned to kScratchAlignment.
#pragma once

#include <cstddef>

#include "espalier/ops/cpu/attention/attention.h"

namespace espalier::attention::cpu {

inline constexpr std::size_t kScratchAlignment = 256;

template <class T>
struct Kernels {
  // Bytes of scratch for this shape and number of threads.
  std::size_t (*forward_scratch)(const Shape& shape, int threads);
  std::size_t (*backward_scratch)(const Shape& shape, int threads);
  // As attention.h, with up to `threads` OpenMP threads.
  void (*forward)(const Shape& shape, const Inputs<T>& in, Rows<T> out, accumulator_t<T>* lse_HQ, void* scratch,
                  int threads);
  void (*add_backward)(const Shape& shape, const Inputs<T>& in, Rows<const T> out, const accumulator_t<T>* lse_HQ,
                       Rows<const T> grad_out, const Gradients<T>& grads, void* scratch, int threads);
};

}  // namespace espalier::attention::cpu
