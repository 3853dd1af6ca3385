#include "espalier/ops/cuda/hopper/tensor_map.h"

#include "espalier/base/error.h"
#include "espalier/ops/cuda/start.h"

namespace espalier::cuda::hopper {

// The driver's function is found through the runtime: the library loads where there is no driver.
TensorMap tensor_map(const Matrix& matrix, int box_rows) {
  static auto* const encode = driver_function<decltype(cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(matrix.columns), static_cast<cuuint64_t>(matrix.rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(matrix.stride) * 2};
  const cuuint32_t box[] = {kPartColumns, static_cast<cuuint32_t>(box_rows)}, steps[] = {1, 1};
  TensorMap map{};
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(matrix.data), sizes,
                                 strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw InternalError({"GPU", "a matrix that tiles are copied from",
                         text_of("cuTensorMapEncodeTiled: error ", static_cast<int>(result), " for ", matrix.rows,
                                 " rows of ", matrix.columns, ", stride ", matrix.stride),
                         "please report this, and use another --attention"});
  return map;
}

}  // namespace espalier::cuda::hopper
