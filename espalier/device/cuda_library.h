// GPUs: what runs on them is a library of its own, libespalier_cuda.so beside the program, opened when one is asked
// for.
#pragma once

#include <string>

#include "espalier/device/device.h"

namespace espalier {

// A GPU of this machine; one a process. Errors: DeviceError, which says what is missing: the library, a library that it
// needs, a driver, a GPU.
Device& open_cuda_device(int index = 0);

// What the library exports: the device, or null and the reason.
using OpenCudaDevice = Device*(int index, std::string* problem);
inline constexpr const char* kOpenCudaDevice = "espalier_open_cuda_device";

}  // namespace espalier
