#include "espalier/device/device.h"

#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <memory>

#include "espalier/base/error.h"

namespace espalier {

std::byte* Device::take_host_memory(std::int64_t bytes) {
  void* const memory =
      mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    throw MemoryBudgetError(
        {"memory", text_of(bytes, " bytes of host memory"), "a failed allocation", "lower --memory-budget"});
  return static_cast<std::byte*>(memory);
}
void Device::give_back_host_memory(std::byte* memory, std::int64_t bytes) {
  munmap(memory, static_cast<std::size_t>(bytes));
}

std::shared_ptr<Group> Device::connect(std::shared_ptr<Group> host, double) { return host; }

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

thread_local Device* bound_to_thread = nullptr;

}  // namespace

Device& bound_device() { return bound_to_thread != nullptr ? *bound_to_thread : *bound(); }
void bind_device(Device& device) { bound() = &device; }
void bind_device_of_thread(Device& device) { bound_to_thread = &device; }

}  // namespace espalier
