// The device that holds tensors and runs operations: the host's processors, or a GPU.
//
// `operations()` has everything that runs on tensors. Operations run in the order of their calls, but possibly after
// the call returns: the next operation can read the results, the host only through to_host. The tensors of an operation
// may be released in their arena, or dropped, as soon as the call returns.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

namespace espalier {

struct Operations;
class Group;  // parallel/group.h

class Device {
 public:
  explicit Device(const Operations& operations) : operations_(operations) {}
  virtual ~Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Operations& operations() const { return operations_; }
  virtual std::string_view name() const = 0;
  // True if its memory is host memory. If so, data is offloaded to a file, otherwise to host memory.
  virtual bool in_host_memory() const { return false; }
  // The number of ranks that share its memory: `local_ranks`, the ranks on this machine, or 1 if each has its own GPU.
  int sharing_memory(int local_ranks) const { return in_host_memory() ? local_ranks : 1; }
  // Returns when everything called so far has run.
  virtual void synchronize() = 0;
  // Bytes of its memory that can still be allocated.
  virtual std::int64_t free_bytes() = 0;
  // Bytes of its memory in use: the process's resident memory; on a GPU all bytes taken since it was opened, also by
  // libraries and other programs.
  virtual std::int64_t held_bytes() = 0;
  // Seconds of a steady clock, read after everything called so far has run.
  virtual double seconds() = 0;
  // moment() marks a place in the order of the work; seconds_between returns the seconds of the work between two marks.
  // Only seconds_between waits. Use each moment in one call only.
  struct Moment {
    double seconds = 0;
    std::int64_t event = -1;
  };
  virtual Moment moment() { return {seconds()}; }
  virtual double seconds_between(const Moment& begin, const Moment& end) { return end.seconds - begin.seconds; }

  // Addresses for an arena; memory is taken as it is touched. Errors: MemoryBudgetError. `release` waits for the work.
  virtual std::byte* reserve(std::int64_t bytes) = 0;
  virtual void release(std::byte* memory, std::int64_t bytes) = 0;
  // Returns the pages wholly inside the range to the machine: their content is lost, the addresses stay reserved.
  virtual void give_back(std::byte* memory, std::int64_t bytes) = 0;
  // Copy reserved memory to and from host memory; the copy is complete when the call returns. Work called before must
  // not use the bytes that copy_in writes, except in pages given back since.
  virtual void copy_out(const std::byte* memory, std::int64_t bytes, std::byte* host) = 0;
  virtual void copy_in(const std::byte* host, std::int64_t bytes, std::byte* memory) = 0;
  // Host memory with which these copies are fastest; begins at a page. Errors: MemoryBudgetError.
  virtual std::byte* take_host_memory(std::int64_t bytes);
  virtual void give_back_host_memory(std::byte* memory, std::int64_t bytes);
  // Reserved addresses as an uninitialised contiguous tensor.
  virtual at::Tensor view(std::byte* memory, at::IntArrayRef sizes, at::ScalarType dtype) = 0;
  // An uninitialised contiguous tensor with memory of its own.
  virtual at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype) = 0;

  // Explicit copies between device and host. If the host can access the device's memory, nothing is copied: to_host and
  // host_room then return the tensor itself.
  virtual at::Tensor to_host(const at::Tensor& tensor) = 0;  // its values after everything called so far has run
  // to_host in two calls, between which more work can be queued: arrived() waits for work called before start_to_host,
  // not for work called after it.
  struct Coming {
    at::Tensor host;
    std::int64_t landing = -1;
  };
  virtual Coming start_to_host(const at::Tensor& tensor) { return {to_host(tensor)}; }
  virtual at::Tensor arrived(const Coming& coming) { return coming.host; }
  virtual at::Tensor host_room(const at::Tensor& tensor) = 0;  // a host tensor like it, to be filled for to_device
  virtual void to_device(const at::Tensor& host, const at::Tensor& tensor) = 0;
  // A tensor of the device with the values of a host tensor, which must not be written any more.
  virtual at::Tensor adopt(const at::Tensor& host) = 0;
  // A tensor [n] of the device with these values (float64).
  at::Tensor upload(std::vector<double> values);

  // A rank group for tensors of this device and of the host, built on a rank group for host tensors. Every rank calls
  // this at the same place. `timeout`: seconds until a rank that others wait for is considered dead. Errors:
  // CommunicationError; DeviceError if ranks of this device cannot reach each other.
  virtual std::shared_ptr<Group> connect(std::shared_ptr<Group> host, double timeout);
  // The device for a rank that is a thread: this one, or a similar one if ranks cannot share it.
  virtual Device& of_thread() { return *this; }

 private:
  const Operations& operations_;
};

// The processors of this machine: operations run at once, copies cost nothing.
Device& cpu_device();
// The same processors, with attention composed of ATen's FlashAttention (ops/attention/composed.h).
Device& flash_cpu_device();

// The device of this run: cpu_device() unless another was bound. Bind once, before anything is made on the device.
Device& bound_device();
void bind_device(Device& device);
// Binds a device for the calling thread only; the thread is a rank.
void bind_device_of_thread(Device& device);

}  // namespace espalier
