// A matrix [rows, columns] of bfloat16 in global memory as the copy engine (TMA) is told of it: it copies boxes of
// kPartColumns columns and some rows to shared memory, zeros where the box leaves the matrix.
#pragma once

#include <cstdint>

#ifndef ESPALIER_EMULATED
#include <cuda.h>
#endif

namespace espalier::cuda::hopper {

// Columns of a box, and the bytes of a row of it.
inline constexpr int kPartColumns = 64, kPartRowBytes = 128;

#ifdef ESPALIER_EMULATED
using TensorMap = emulation::TensorMap;
#else
using TensorMap = CUtensorMap;
#endif

struct Matrix {
  const void* data;
  std::int64_t rows, columns;
  std::int64_t stride;  // elements between rows
};
// Errors: InternalError where the driver refuses the matrix or the box.
TensorMap tensor_map(const Matrix& matrix, int box_rows);

}  // namespace espalier::cuda::hopper
