#include "espalier/device/device.h"

#include <ATen/ops/from_blob.h>

#include <memory>

namespace espalier {

at::Tensor Device::upload(std::vector<double> values) {
  const auto kept = std::make_shared<std::vector<double>>(std::move(values));
  return adopt(at::from_blob(
      kept->data(), {static_cast<std::int64_t>(kept->size())}, [kept](void*) {},
      at::TensorOptions().dtype(at::kDouble)));
}

namespace {

Device*& bound() {
  static Device* device = &cpu_device();
  return device;
}

}  // namespace

Device& bound_device() { return *bound(); }
void bind_device(Device& device) { bound() = &device; }

}  // namespace espalier
