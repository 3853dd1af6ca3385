// The processors of this machine as a device: memory is the host's own, so copies return what they are given.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "espalier/base/error.h"
#include "espalier/device/device.h"
#include "espalier/machine/memory.h"
#include "espalier/metrics/timer.h"
#include "espalier/ops/cpu/operations.h"

namespace espalier {
namespace {

class CpuDevice : public Device {
 public:
  explicit CpuDevice(const Operations& operations) : Device(operations) {}

  bool in_host_memory() const override { return true; }
  std::string_view name() const override { return "cpu"; }
  void synchronize() override {}
  std::int64_t free_bytes() override { return available_bytes(); }
  std::int64_t held_bytes() override { return resident_bytes(); }
  double seconds() override { return Timer::steady_seconds(); }

  std::byte* reserve(std::int64_t bytes) override {
    void* memory = mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
      throw MemoryBudgetError({"Arena", text_of("an address range of ", bytes, " bytes"), "a failed reservation",
                               "lower --memory-budget or raise the limit on address space (ulimit -v)"});
    return static_cast<std::byte*>(memory);
  }
  void release(std::byte* memory, std::int64_t bytes) override { munmap(memory, static_cast<std::size_t>(bytes)); }
  void give_back(std::byte* memory, std::int64_t bytes) override {
    static const std::int64_t page = sysconf(_SC_PAGESIZE);
    const std::int64_t skipped = (page - reinterpret_cast<std::intptr_t>(memory) % page) % page;
    const std::int64_t whole = (bytes - skipped) / page * page;
    if (whole > 0) madvise(memory + skipped, static_cast<std::size_t>(whole), MADV_DONTNEED);
  }
  void copy_out(const std::byte* memory, std::int64_t bytes, std::byte* host) override {
    std::memcpy(host, memory, static_cast<std::size_t>(bytes));
  }
  void copy_in(const std::byte* host, std::int64_t bytes, std::byte* memory) override {
    std::memcpy(memory, host, static_cast<std::size_t>(bytes));
  }
  at::Tensor view(std::byte* memory, at::IntArrayRef sizes, at::ScalarType dtype) override {
    return at::from_blob(memory, sizes, at::TensorOptions().dtype(dtype));
  }
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype) override {
    return at::empty(sizes, at::TensorOptions().dtype(dtype));
  }

  at::Tensor to_host(const at::Tensor& tensor) override { return tensor; }
  at::Tensor host_room(const at::Tensor& tensor) override { return tensor; }
  void to_device(const at::Tensor& host, const at::Tensor& tensor) override {
    if (host.data_ptr() != tensor.data_ptr()) tensor.copy_(host);
  }
  at::Tensor adopt(const at::Tensor& host) override { return host; }
};

}  // namespace

Device& cpu_device() {
  static CpuDevice device(cpu::operations());
  return device;
}

Device& flash_cpu_device() {
  static CpuDevice device(cpu::flash_operations());
  return device;
}

std::unique_ptr<Device> cpu::device_with(const Operations& operations) {
  return std::make_unique<CpuDevice>(operations);
}

const Operations& cpu::operations() {
  static const Operations all{norm_operations(),       rotation_operations(),
                              swiglu_operations(),     product_operations(),
                              moving_operations(),     attention_operations(),
                              head_operations(),       expert_operations(),
                              optimizer_operations(),  choice_operations(),
                              delta_rule_operations(), short_convolution_operations(),
                              latent_operations(),     {}};
  return all;
}

const Operations& cpu::flash_operations() {
  static const Operations all = [] {
    Operations changed = operations();
    static_cast<AttentionOperations&>(changed) = flash_attention_operations();
    return changed;
  }();
  return all;
}

}  // namespace espalier
