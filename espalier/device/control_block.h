// Copies numbers from the host to the device in one transfer: ids, positions, edges, temperatures.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "espalier/device/device.h"

namespace espalier {

class ControlBlock {
 public:
  // hand_over sets `tensor` to a tensor [n] of the device with these values (int32, float64). The object `tensor` must
  // not move before.
  void add(std::span<const std::int32_t> values, at::Tensor& tensor);
  void add(std::span<const double> values, at::Tensor& tensor);
  void hand_over(Device& device);

 private:
  struct Part {
    at::Tensor* tensor;
    at::ScalarType dtype;
    std::int64_t begin, count;  // elements of the dtype
  };
  std::vector<double> values_;  // two int32 take one element
  std::vector<Part> parts_;
};

}  // namespace espalier
