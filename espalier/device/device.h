// A place where tensors live and operations run: the host's processors, or a GPU.
//
// `operations()` holds everything that runs on tensors. Operations run in the order of their calls, but possibly later:
// the next operation can read the results, the host only through to_host. An operation's tensors may be released in
// their arena, or dropped, as soon as the call returns.
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
  // Whether its memory is the host's. If so, data is offloaded to a file, otherwise to host memory.
  virtual bool in_host_memory() const { return false; }
  // Ranks, of `local_ranks` on this machine, that share its memory: each has a GPU of its own.
  int sharing_memory(int local_ranks) const { return in_host_memory() ? local_ranks : 1; }
  // Returns when everything called so far has run.
  virtual void synchronize() = 0;
  // Bytes of its memory that can still be allocated.
  virtual std::int64_t free_bytes() = 0;
  // Bytes of its memory that are held: resident memory of the process; on a GPU what was taken since it was opened, by
  // libraries too.
  virtual std::int64_t held_bytes() = 0;
  // Seconds of a steady clock, once everything called so far has run.
  virtual double seconds() = 0;
  // A place in the order of the work, and the seconds of the work between two of them. Only the second waits. Use each
  // moment in one call only.
  struct Moment {
    double seconds = 0;
    std::int64_t event = -1;
  };
  virtual Moment moment() { return {seconds()}; }
  virtual double seconds_between(const Moment& begin, const Moment& end) { return end.seconds - begin.seconds; }

  // Addresses for an arena; memory is taken as it is touched. Errors: MemoryBudgetError. `release` waits for the work.
  virtual std::byte* reserve(std::int64_t bytes) = 0;
  virtual void release(std::byte* memory, std::int64_t bytes) = 0;
  // Gives the pages that lie wholly inside back to the machine: what they held is lost, the addresses stay reserved.
  virtual void give_back(std::byte* memory, std::int64_t bytes) = 0;
  // Reserved memory to and from the host's, done when the call returns. No work that was called before may use what
  // copy_in writes, but for pages given back since.
  virtual void copy_out(const std::byte* memory, std::int64_t bytes, std::byte* host) = 0;
  virtual void copy_in(const std::byte* host, std::int64_t bytes, std::byte* memory) = 0;
  // The host's memory that these copies are fastest with; begins at a page. Errors: MemoryBudgetError.
  virtual std::byte* take_host_memory(std::int64_t bytes);
  virtual void give_back_host_memory(std::byte* memory, std::int64_t bytes);
  // Reserved addresses as an uninitialised contiguous tensor.
  virtual at::Tensor view(std::byte* memory, at::IntArrayRef sizes, at::ScalarType dtype) = 0;
  // An uninitialised contiguous tensor with memory of its own.
  virtual at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype) = 0;

  // The declared copies. Where the host can touch the device's memory nothing is copied: what to_host and host_room
  // return is then the tensor itself.
  virtual at::Tensor to_host(const at::Tensor& tensor) = 0;  // what it holds once everything called so far has run
  // The same in two calls, between which more work can be given: the second waits for what the first one was given
  // after and for nothing given since.
  struct Coming {
    at::Tensor host;
    std::int64_t landing = -1;
  };
  virtual Coming start_to_host(const at::Tensor& tensor) { return {to_host(tensor)}; }
  virtual at::Tensor arrived(const Coming& coming) { return coming.host; }
  virtual at::Tensor host_room(const at::Tensor& tensor) = 0;  // a host tensor like it, to be filled for to_device
  virtual void to_device(const at::Tensor& host, const at::Tensor& tensor) = 0;
  // A host tensor, which must not be written any more, as a tensor of the device.
  virtual at::Tensor adopt(const at::Tensor& host) = 0;
  // The values as a tensor [n] of the device.
  at::Tensor upload(std::vector<double> values);

  // A rank group for tensors of this device and of the host, built on a rank group for host tensors. Every rank calls
  // this at the same place. `timeout`: seconds until a rank that others wait for is considered dead. Errors:
  // CommunicationError; DeviceError if ranks of this device cannot reach each other.
  virtual std::shared_ptr<Group> connect(std::shared_ptr<Group> host, double timeout);
  // For a rank that is a thread: this device, or a similar one if ranks cannot share it.
  virtual Device& of_thread() { return *this; }

 private:
  const Operations& operations_;
};

// The processors of this machine: operations run at once, copies cost nothing.
Device& cpu_device();
// The same, with attention composed of ATen's FlashAttention (ops/composed/attention.h).
Device& flash_cpu_device();

// The device of this run: cpu_device() unless another was bound, which happens once, before anything is made on it.
Device& bound_device();
void bind_device(Device& device);
// The same of the calling thread, which is a rank by itself.
void bind_device_of_thread(Device& device);

}  // namespace espalier
