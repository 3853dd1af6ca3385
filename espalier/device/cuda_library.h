// GPUs: what runs on them is a library of its own, libespalier_cuda.so beside the program, opened when one is asked
// for.
#pragma once

#include <string>

#include "espalier/device/device.h"

namespace espalier {

// Whose attention: kernels of the library, ATen's FlashAttention-2, or graphs of cuDNN.
enum class AttentionBy { automatic, own, flash, cudnn };  // automatic: cudnn on Hopper, else flash, else own

struct GpuChoice {
  int index = 0;  // among those of this machine: a rank's own number there
  AttentionBy attention = AttentionBy::own;
  bool emulated = false;  // for tests: the library that runs the same host code and kernels on processors
};

// A GPU of this machine; one a process. Errors: DeviceError, which says what is missing: the library, a library that it
// needs, a driver, a GPU.
Device& open_cuda_device(const GpuChoice& choice = {});

// What the library exports: the device, or null and the reason.
using OpenCudaDevice = Device*(const GpuChoice& choice, std::string* problem);
inline constexpr const char* kOpenCudaDevice = "espalier_open_cuda_device";

}  // namespace espalier
