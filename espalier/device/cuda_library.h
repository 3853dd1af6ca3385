// GPUs: what runs on them is a library of its own, libespalier_cuda.so beside the program, opened when one is asked
// for.
#pragma once

#include <functional>
#include <string>

#include "espalier/device/device.h"

namespace espalier {

// The attention kernels: those of the library, ATen's FlashAttention-2, or graphs of cuDNN; `automatic`: the fastest
// that was measured, else cudnn on Hopper, flash on other GPUs, own without these.
enum class AttentionBy { automatic, own, flash, cudnn };
const char* name_of(AttentionBy attention);

struct GpuChoice {
  int index = 0;  // among those of this machine: a rank's own number there
  AttentionBy attention = AttentionBy::own;
  bool emulated = false;  // for tests: the library that runs the same host code and kernels on processors
  // The meaning of automatic on a GPU of this name: the fastest that was measured there, or automatic without any.
  std::function<AttentionBy(const std::string& gpu)> fastest = nullptr;
};

struct OpenedGpu {
  std::string name;                                // as its driver has it; empty where none was opened
  AttentionBy attention = AttentionBy::automatic;  // what it runs
};

// A GPU of this machine; one a process. Errors: DeviceError, which says what is missing: the library, a library that it
// needs, a driver, a GPU.
Device& open_cuda_device(const GpuChoice& choice = {});
const OpenedGpu& opened_gpu();

// The export of the library: the device, or null and the reason.
using OpenCudaDevice = Device*(const GpuChoice& choice, OpenedGpu* opened, std::string* problem);
inline constexpr const char* kOpenCudaDevice = "espalier_open_gpu";

}  // namespace espalier
