// In place of ATen's own header, which all of ATen's functions include and none uses: it brings all types of
// TorchScript with it, whose inline functions GCC compiles anew for each file, half a second long.
#pragma once

#include <c10/core/DeviceGuard.h>
