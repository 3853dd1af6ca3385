#include "espalier/device/cuda_library.h"

#include <dlfcn.h>

#include <filesystem>

#include "espalier/base/error.h"

namespace espalier {
namespace {

OpenedGpu& gpu_of_process() {
  static OpenedGpu gpu;
  return gpu;
}

}  // namespace

const OpenedGpu& opened_gpu() { return gpu_of_process(); }

Device& open_cuda_device(const GpuChoice& choice) {
  std::error_code unreadable;
  const auto library = std::filesystem::read_symlink("/proc/self/exe", unreadable).parent_path() /
                       (choice.emulated ? "libespalier_emulated.so" : "libespalier_cuda.so");
  if (!std::filesystem::exists(library, unreadable))
    throw DeviceError({"--device cuda", "the CUDA library of this build, " + library.string(), "no such file",
                       "leave --device out, or build with a CUDA toolkit: make cuda"});
  void* const opened = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr)
    throw DeviceError({"--device cuda", "a CUDA library that can be opened", dlerror(),
                       "leave --device out, or install what is missing (tools/requirements-cuda-libraries.txt)"});
  auto* const open = reinterpret_cast<OpenCudaDevice*>(dlsym(opened, kOpenCudaDevice));
  std::string problem;
  Device* const device = open == nullptr ? nullptr : open(choice, &gpu_of_process(), &problem);
  if (device == nullptr)
    throw DeviceError({"--device cuda", "a GPU with CUDA 13 and its driver",
                       open == nullptr ? library.string() + " of another version" : problem,
                       "leave --device out, or run on a machine where nvidia-smi lists a GPU"});
  return *device;
}

}  // namespace espalier
