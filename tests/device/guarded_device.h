// A device that punishes what a GPU would punish, on a CPU.
//
// Its memory is pages of its own that nobody can touch except while its operations and declared copies run: code that
// reads or writes a tensor directly ends by a segmentation fault. Operations run late, in order, at the next copy to
// the host or synchronisation: memory that goes away before the work that was called on it has run is found out by that
// work.
#pragma once

#include <functional>
#include <map>
#include <vector>

#include "espalier/device/device.h"
#include "espalier/ops/operations.h"

namespace espalier::testing {

class GuardedDevice : public Device {
 public:
  GuardedDevice();

  std::string_view name() const override { return "guarded"; }
  void synchronize() override;
  std::int64_t free_bytes() override;
  std::int64_t held_bytes() override;
  double seconds() override;
  std::byte* reserve(std::int64_t bytes) override;
  void release(std::byte* memory, std::int64_t bytes) override;
  void give_back(std::byte* memory, std::int64_t bytes) override;
  void copy_out(const std::byte* memory, std::int64_t bytes, std::byte* host) override;
  void copy_in(const std::byte* host, std::int64_t bytes, std::byte* memory) override;
  at::Tensor view(std::byte* memory, at::IntArrayRef sizes, at::ScalarType dtype) override;
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype) override;
  at::Tensor to_host(const at::Tensor& tensor) override;
  at::Tensor host_room(const at::Tensor& tensor) override;
  void to_device(const at::Tensor& host, const at::Tensor& tensor) override;
  at::Tensor adopt(const at::Tensor& host) override;

  void queue(std::function<void()> work) { queue_.push_back(std::move(work)); }
  std::int64_t operations_run() const { return operations_run_; }
  std::int64_t copies_back() const { return copies_back_; }
  // Unmaps memory at once, whatever work waits for it: the fault that `release` exists to prevent.
  void release_early(std::byte* memory, std::int64_t bytes);

 private:
  void protect(int how);                             // all memory
  void protect_block(const void* address, int how);  // the block that the address is in
  std::byte* map(std::int64_t bytes);

  std::vector<std::function<void()>> queue_;
  std::map<std::byte*, std::size_t> blocks_;  // address, bytes in whole pages
  std::int64_t operations_run_ = 0, copies_back_ = 0;
};

// The one of this process: its operations are functions, which know no other.
GuardedDevice& guarded_device();

// A program that links this file runs on it where ESPALIER_TEST_DEVICE is "guarded", and with ATen's FlashAttention
// where that is "flash".

}  // namespace espalier::testing
