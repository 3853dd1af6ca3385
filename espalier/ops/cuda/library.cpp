// The one function that the program looks up in this library (device/cuda_library.h).
#include <cstdlib>
#include <string>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/device/cuda_library.h"
#include "espalier/ops/cuda/aten.h"
#include "espalier/ops/cuda/chunk_trial.h"
#include "espalier/ops/cuda/device.h"
#include "espalier/ops/cuda/open_attention.h"
#include "espalier/ops/cuda/operations.h"
#include "espalier/ops/cuda/start.h"

namespace espalier::cuda {
namespace {

AttentionOperations open_attention(AttentionKernels kernels, const AttentionGpu& gpu) {
  static constexpr decltype(&open_own_attention) kOpen[] = {
#define ESPALIER_ROW(name, ...) open_##name##_attention,
      ESPALIER_ATTENTION_KERNELS(ESPALIER_ROW)
#undef ESPALIER_ROW
  };
  return kOpen[static_cast<std::size_t>(kernels) - 1](gpu);
}

// Changes `attention` from automatic to what it comes to.
AttentionOperations chosen_attention(AttentionKernels& attention, AttentionKernels fastest, const AttentionGpu& gpu) {
  if (attention != AttentionKernels::automatic) return open_attention(attention, gpu);
  std::vector<AttentionKernels> tried = tried_in_order();
  if (fastest != AttentionKernels::automatic) tried.insert(tried.begin(), fastest);
  for (auto each = tried.begin();; ++each) {
    attention = *each;
    try {
      return open_attention(attention, gpu);
    } catch (
        const DeviceError&) {  // a GPU, a build or a machine without it: the next one serves; own kernels always do
      if (each + 1 == tried.end()) throw;
    }
  }
}

CudaDevice* gpu = nullptr;  // outlives every tensor

// A few kernels' time, so models without such layers do without.
const std::string& without_chunks() {
  static const std::string why = try_chunks(*gpu);
  return why;
}

Device* open(const GpuChoice& choice, OpenedGpu* opened, std::string* problem) {
  // Before CUDA's first call, which reads it.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", std::to_string(kMostConnections).c_str(), 0);
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  // A launcher that shows each rank one GPU alone numbers it 0; NCCL says so where ranks then share one.
  const int index = count == 1 ? 0 : choice.index;
  if (status != cudaSuccess || index >= count) {
    *problem = status != cudaSuccess ? cudaGetErrorString(status)
                                     : text_of(count, " GPUs for rank ", choice.index, " of this machine");
    return nullptr;
  }
  cudaDeviceProp properties{};
  expect_success(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
  if (properties.major < 8) {
    *problem = text_of(properties.name, ", of compute capability ", properties.major, ".", properties.minor,
                       "; 8.0 or newer is needed");
    return nullptr;
  }
  (void)open_aten(index);  // first: ATen remembers its first answer to whether there is CUDA
  start(index, properties.major);
  opened->name = properties.name, opened->attention = choice.attention;
  opened->capability = 10 * properties.major + properties.minor;
  const AttentionKernels fastest = choice.fastest ? choice.fastest(opened->name) : AttentionKernels::automatic;
  static Operations chosen = operations();
  static_cast<AttentionOperations&>(chosen) =
      chosen_attention(opened->attention, fastest, {index, properties.major, properties.minor, choice.deterministic});
  chosen.without_chunks = without_chunks;
  gpu = new CudaDevice(chosen, "cuda");
  return gpu;
}

}  // namespace
}  // namespace espalier::cuda

extern "C" espalier::Device* espalier_open_gpu(const espalier::GpuChoice& choice, espalier::OpenedGpu* opened,
                                               std::string* problem) {
  return espalier::cuda::open(choice, opened, problem);
}
