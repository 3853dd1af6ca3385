#include "tests/device/guarded_device.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>

#include "espalier/base/error.h"
#include "espalier/machine/memory.h"
#include "espalier/metrics/timer.h"
#include "tests/device/late_operations.h"

namespace espalier::testing {
namespace {

struct GuardedQueue {
  static void give(std::function<void()> work) { guarded_device().queue(std::move(work)); }
};

std::size_t whole_pages(std::int64_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return (static_cast<std::size_t>(bytes) + page) / page * page;  // at least one
}

struct BindByEnvironment {
  BindByEnvironment() {
    const char* named = std::getenv("ESPALIER_TEST_DEVICE");
    if (named == nullptr) return;
    if (std::string_view(named) == "guarded") bind_device(guarded_device());
    if (std::string_view(named) == "flash") bind_device(flash_cpu_device());
  }
} const bind_by_environment;

}  // namespace

GuardedDevice& guarded_device() {
  static auto* const device = new GuardedDevice;  // outlives every tensor
  return *device;
}

GuardedDevice::GuardedDevice() : Device(late_operations<GuardedQueue>()) {}

void GuardedDevice::protect(int how) {
  for (const auto& [memory, bytes] : blocks_) ESPALIER_INTERNAL_EQ(mprotect(memory, bytes, how), 0);
}

void GuardedDevice::protect_block(const void* address, int how) {
  auto block = blocks_.upper_bound(static_cast<std::byte*>(const_cast<void*>(address)));
  ESPALIER_INTERNAL(block != blocks_.begin(), "memory that is not this device's");
  --block;
  ESPALIER_INTERNAL_EQ(mprotect(block->first, block->second, how), 0);
}

void GuardedDevice::synchronize() {
  if (queue_.empty()) return;
  protect(PROT_READ | PROT_WRITE);
  for (const auto& work : std::exchange(queue_, {})) {
    work();
    ++operations_run_;
  }
  protect(PROT_NONE);
}

std::int64_t GuardedDevice::free_bytes() { return available_bytes(); }
std::int64_t GuardedDevice::held_bytes() { return resident_bytes(); }

double GuardedDevice::seconds() {
  synchronize();
  return Timer::steady_seconds();
}

std::byte* GuardedDevice::map(std::int64_t bytes) {
  void* memory = mmap(nullptr, whole_pages(bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ESPALIER_INTERNAL(memory != MAP_FAILED, bytes, " bytes");
  blocks_[static_cast<std::byte*>(memory)] = whole_pages(bytes);
  return static_cast<std::byte*>(memory);
}

std::byte* GuardedDevice::reserve(std::int64_t bytes) { return map(bytes); }

void GuardedDevice::release(std::byte* memory, std::int64_t bytes) {
  synchronize();
  release_early(memory, bytes);
}

void GuardedDevice::release_early(std::byte* memory, std::int64_t bytes) {
  blocks_.erase(memory);
  munmap(memory, whole_pages(bytes));
}

void GuardedDevice::give_back(std::byte* memory, std::int64_t bytes) {
  synchronize();
  protect_block(memory, PROT_READ | PROT_WRITE);
  std::memset(memory, 0xff, static_cast<std::size_t>(bytes));  // what they held is lost, and nobody may count on zeros
  protect_block(memory, PROT_NONE);
}

void GuardedDevice::copy_out(const std::byte* memory, std::int64_t bytes, std::byte* host) {
  synchronize();
  protect_block(memory, PROT_READ);
  std::memcpy(host, memory, static_cast<std::size_t>(bytes));
  protect_block(memory, PROT_NONE);
}

void GuardedDevice::copy_in(const std::byte* host, std::int64_t bytes, std::byte* memory) {
  synchronize();
  protect_block(memory, PROT_READ | PROT_WRITE);
  std::memcpy(memory, host, static_cast<std::size_t>(bytes));
  protect_block(memory, PROT_NONE);
}

at::Tensor GuardedDevice::view(std::byte* memory, at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::from_blob(memory, sizes, at::TensorOptions().dtype(dtype));
}

at::Tensor GuardedDevice::allocate(at::IntArrayRef sizes, at::ScalarType dtype) {
  const auto bytes = c10::multiply_integers(sizes) * static_cast<std::int64_t>(c10::elementSize(dtype));
  // Work that was called holds the tensor, so its memory is released after that work.
  const auto free = [this, bytes](void* data) { release_early(static_cast<std::byte*>(data), bytes); };
  const at::Tensor tensor = at::from_blob(map(bytes), sizes, free, at::TensorOptions().dtype(dtype));
  queue([tensor, bytes] { std::memset(tensor.data_ptr(), 0xff, static_cast<std::size_t>(bytes)); });
  return tensor;
}

at::Tensor GuardedDevice::to_host(const at::Tensor& tensor) {
  ++copies_back_;
  synchronize();
  if (tensor.numel() == 0) return tensor.clone();
  protect_block(tensor.data_ptr(), PROT_READ);
  at::Tensor copy = tensor.clone();
  protect_block(tensor.data_ptr(), PROT_NONE);
  return copy;
}

at::Tensor GuardedDevice::host_room(const at::Tensor& tensor) {
  return at::full(tensor.sizes(), NAN, at::TensorOptions().dtype(tensor.scalar_type()));
}

void GuardedDevice::to_device(const at::Tensor& host, const at::Tensor& tensor) {
  const at::Tensor staged = host.clone();
  queue([staged, tensor] { at::Tensor(tensor).copy_(staged); });
}

at::Tensor GuardedDevice::adopt(const at::Tensor& host) {
  const at::Tensor tensor = allocate(host.sizes(), host.scalar_type());
  to_device(host, tensor);
  return tensor;
}

}  // namespace espalier::testing
