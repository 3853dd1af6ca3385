// The one function that the program looks up in this library (device/cuda_library.h).
#include <string>

#include "espalier/base/error.h"
#include "espalier/device/cuda_library.h"
#include "espalier/ops/cuda/aten.h"
#include "espalier/ops/cuda/cudnn_attention.h"
#include "espalier/ops/cuda/device.h"
#include "espalier/ops/cuda/flash_attention.h"
#include "espalier/ops/cuda/hopper/attention.h"
#include "espalier/ops/cuda/operations.h"
#include "espalier/ops/cuda/start.h"

namespace espalier::cuda {
namespace {

// Changes `attention` from automatic to what it comes to.
const Operations& operations_of(AttentionBy& attention, AttentionBy fastest, int index, int capability, int minor,
                                bool deterministic) {
  if (attention == AttentionBy::automatic) {
    for (AttentionBy each : {fastest, AttentionBy::cudnn, AttentionBy::flash}) {
      if (each == AttentionBy::automatic) continue;
      try {
        const Operations& found = operations_of(each, each, index, capability, minor, deterministic);
        attention = each;
        return found;
      } catch (const DeviceError&) {  // a GPU, a build or a machine without it: the next one serves
      }
    }
    attention = AttentionBy::own;
  }
  if (attention == AttentionBy::own) return operations();
  static Operations changed = operations();
  AttentionOperations& changes = changed;
  if (attention == AttentionBy::flash) changes = open_flash_attention(index, deterministic);
  if (attention == AttentionBy::cudnn) changes = open_cudnn_attention(index, capability, deterministic);
  if (attention == AttentionBy::hopper) {
    if (!hopper::runs_on(capability, minor))
      throw DeviceError({"--attention hopper", "a GPU of compute capability 9.0", text_of(capability, ".", minor),
                         "use --attention own"});
    changes = hopper_attention_operations();
  }
  return changed;
}

Device* open(const GpuChoice& choice, OpenedGpu* opened, std::string* problem) {
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
  const AttentionBy fastest = choice.fastest ? choice.fastest(opened->name) : AttentionBy::automatic;
  static CudaDevice* const device =  // outlives every tensor
      new CudaDevice(
          operations_of(opened->attention, fastest, index, properties.major, properties.minor, choice.deterministic),
          "cuda");
  return device;
}

}  // namespace
}  // namespace espalier::cuda

extern "C" espalier::Device* espalier_open_gpu(const espalier::GpuChoice& choice, espalier::OpenedGpu* opened,
                                               std::string* problem) {
  return espalier::cuda::open(choice, opened, problem);
}
