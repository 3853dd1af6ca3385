// The CUDA library's side of launch.h.
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "espalier/ops/cuda/launch.h"
#include "espalier/ops/cuda/start.h"

namespace espalier::cuda::hopper {

bool holds_together(const void* kernel, int threads, std::int64_t shared_bytes, std::int64_t blocks) {
  allow_shared_bytes(kernel, shared_bytes);
  int launches = 0, multiprocessors = 0, of_one = 0;
  expect_success(cudaDeviceGetAttribute(&launches, cudaDevAttrCooperativeLaunch, gpu_index()), "cooperative launches");
  expect_success(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, gpu_index()),
                 "the number of multiprocessors");
  expect_success(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_one, kernel, threads, static_cast<std::size_t>(shared_bytes)),
      "the blocks of a multiprocessor");
  return launches != 0 && std::int64_t{of_one} * multiprocessors >= blocks;
}

void start_together(const void* kernel, std::int64_t blocks_x, std::int64_t blocks_y, int threads,
                    std::int64_t shared_bytes, void** arguments) {
  allow_shared_bytes(kernel, shared_bytes);
  const dim3 blocks(static_cast<unsigned>(blocks_x), static_cast<unsigned>(blocks_y));
  expect_success(cudaLaunchCooperativeKernel(kernel, blocks, dim3(static_cast<unsigned>(threads)), arguments,
                                             static_cast<std::size_t>(shared_bytes), stream()),
                 "a launch of blocks that wait for each other");
}

}  // namespace espalier::cuda::hopper
