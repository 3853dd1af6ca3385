// Opens the library with all GPU code, libespalier_cuda.so beside the program. It is loaded only when a GPU is
// requested.
#pragma once

#include <functional>
#include <string>

#include "espalier/device/device.h"
#include "espalier/options/choices.h"

namespace espalier {

struct GpuChoice {
  int index = 0;  // of the GPU: the rank's number among the machine's ranks. Not used if the process sees one GPU only
  AttentionKernels attention =
      AttentionKernels::own;  // automatic: the fastest measured, else by AttentionKernelsRow::tried
  bool deterministic = true;  // attention by a library gives the same bits in every run
  bool emulated = false;      // for tests: use the library that runs the same host code and kernels on the CPU
  // Returns the attention that was measured to be the fastest on a GPU of this name; automatic: none was measured.
  std::function<AttentionKernels(const std::string& gpu)> fastest = nullptr;
};

struct OpenedGpu {
  std::string name;                                          // from its driver; empty if no GPU was opened
  AttentionKernels attention = AttentionKernels::automatic;  // the kernels in use
  bool emulated = false;
  int capability = 0;  // ten times its compute capability
};

// Opens a GPU of this machine; a process has one. Errors: DeviceError naming what is missing: the library, a library
// that it needs, a driver, or a GPU.
Device& open_cuda_device(const GpuChoice& choice = {});
const OpenedGpu& opened_gpu();

// The function that the library exports. Returns the device, or null and the reason in `problem`.
using OpenCudaDevice = Device*(const GpuChoice& choice, OpenedGpu* opened, std::string* problem);
inline constexpr const char* kOpenCudaDevice = "espalier_open_gpu";

}  // namespace espalier
