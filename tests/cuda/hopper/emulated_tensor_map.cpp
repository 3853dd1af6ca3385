// The driver's part for the kernels of sm_90a, emulated: what the copy engine is told, and how many blocks a GPU holds.
#define ESPALIER_EMULATED
#include "tests/cuda/hopper/twins.h"
//
#include "espalier/base/error.h"
#include "espalier/ops/cuda/hopper/launch.h"

namespace espalier::cuda::hopper {

TensorMap tensor_map(const Matrix& matrix, int box_rows) {
  TensorMap map;
  const std::string problem =
      emulation::encode_tensor_map(map, matrix.data, matrix.rows, matrix.columns, matrix.stride * 2, box_rows);
  ESPALIER_INTERNAL(problem.empty(), "a matrix that the driver refuses: " + problem);
  return map;
}

// A multiprocessor, which holds one block, has 65,536 registers.
bool holds_together(const void*, int threads, std::int64_t shared_bytes, std::int64_t blocks) {
  return threads > 0 && threads * kLaunchRegisters <= 65536 && shared_bytes <= kSharedBytes &&
         blocks <= static_cast<std::int64_t>(emulation::most_together());
}

}  // namespace espalier::cuda::hopper
