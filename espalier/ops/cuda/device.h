// A GPU as a device (device/device.h), on top of runtime.h.
//
// Operations run in the compute stream, in order. Copies to the host run in the copy stream after the work that they
// read. Data from the host is staged in pinned memory, so that the host does not wait for the copy. Reserved addresses
// come from the driver: pages are mapped when a tensor is first viewed in them. Returned pages are reused once the work
// that used them has run, so returning them does not wait. CUDA may wait for the whole device to unmap or free a page,
// as for pinned memory (below), so no page is unmapped or freed while a collective is under way.
#pragma once

#include <array>
#include <deque>
#include <map>
#include <vector>

#include "espalier/device/device.h"
#include "espalier/ops/cuda/runtime.h"

namespace espalier::cuda {

// Pinned memory that grows. CUDA may wait for the whole device to take or free pinned memory, and collectives may wait
// for other ranks, which may wait for this host: while one is under way, what does not fit lies in pageable memory.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  std::byte* of(std::size_t bytes);          // its content may be lost
  std::byte* here() const { return here_; }  // what of() returned last

 private:
  void* memory_ = nullptr;
  std::size_t bytes_ = 0;
  std::vector<std::byte> pageable_;
  std::byte* here_ = nullptr;
};

class CudaDevice : public Device {
 public:
  CudaDevice(const Operations& operations, std::string_view name) : Device(operations), name_(name) {}

  std::string_view name() const override { return name_; }
  void synchronize() override;
  std::int64_t free_bytes() override;
  std::int64_t held_bytes() override;
  double seconds() override;
  Moment moment() override;
  double seconds_between(const Moment& begin, const Moment& end) override;
  std::byte* reserve(std::int64_t bytes) override;
  void release(std::byte* memory, std::int64_t bytes) override;
  void give_back(std::byte* memory, std::int64_t bytes) override;
  void copy_out(const std::byte* memory, std::int64_t bytes, std::byte* host) override;
  void copy_in(const std::byte* host, std::int64_t bytes, std::byte* memory) override;
  std::byte* take_host_memory(std::int64_t bytes) override;
  void give_back_host_memory(std::byte* memory, std::int64_t bytes) override;
  at::Tensor view(std::byte* memory, at::IntArrayRef sizes, at::ScalarType dtype) override;
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype) override;
  at::Tensor to_host(const at::Tensor& tensor) override { return arrived(start_to_host(tensor)); }
  Coming start_to_host(const at::Tensor& tensor) override;
  at::Tensor arrived(const Coming& coming) override;
  at::Tensor host_room(const at::Tensor& tensor) override;
  void to_device(const at::Tensor& host, const at::Tensor& tensor) override;
  at::Tensor adopt(const at::Tensor& host) override;
  std::shared_ptr<Group> connect(std::shared_ptr<Group> host, double timeout) override;

  // True if a tensor, possibly empty, is on this device.
  bool holds(const at::Tensor& tensor) const;

 private:
  // A block that holds values until their copy to the device has run.
  struct Staging {
    PinnedMemory memory;
    Event copied = kNoEvent;
  };
  // Buffers for values in flight to the host; free once the values are fetched.
  struct Landing {
    PinnedMemory memory;
    Event copied = kNoEvent;
    bool free = true;
  };
  struct Range {
    std::vector<Page> pages;  // kNoPage: not mapped
  };
  // A returned page that earlier work may still use.
  struct Leaving {
    Page page;
    std::byte* at;
    Event used;
  };

  std::byte* staged(std::size_t bytes);
  void sent();
  void wait_and_forget(Event event);
  std::pair<std::byte*, Range*> range_of(const std::byte* memory);
  void map_pages(const std::byte* memory, std::int64_t bytes);
  Page next_page();
  Page oldest_leaving();  // unmapped; no collective is under way
  void free_leaving();

  std::string_view name_;
  std::array<Staging, 2> staging_;
  std::size_t turn_ = 0;
  std::deque<Landing> landings_;
  std::map<std::byte*, Range> ranges_;
  std::deque<Leaving> leaving_;
};

}  // namespace espalier::cuda
