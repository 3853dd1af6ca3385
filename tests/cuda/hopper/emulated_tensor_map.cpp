// tensor_map() of the emulation: what the copy engine of a GPU is told by the driver.
#define ESPALIER_EMULATED
#include "tests/cuda/hopper/twins.h"
//
#include "espalier/base/error.h"
#include "espalier/ops/cuda/hopper/tensor_map.h"

namespace espalier::cuda::hopper {

TensorMap tensor_map(const Matrix& matrix, int box_rows) {
  TensorMap map;
  const std::string problem =
      emulation::encode_tensor_map(map, matrix.data, matrix.rows, matrix.columns, matrix.stride * 2, box_rows);
  ESPALIER_INTERNAL(problem.empty(), "a matrix that the driver refuses: " + problem);
  return map;
}

}  // namespace espalier::cuda::hopper
