#include "tests/cuda/emulated_runtime.h"

#include <ATen/ATen.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <string_view>

#include "espalier/base/error.h"
#include "espalier/device/scalar_type.h"
#include "espalier/observe/memory.h"
#include "espalier/observe/timer.h"
#include "espalier/ops/cuda/device.h"
#include "espalier/ops/cuda/launch.h"
#include "espalier/ops/cuda/operations.h"
#include "espalier/ops/cuda/products.h"
#include "tests/cuda/emulation.h"
#include "tests/device/late_operations.h"

namespace espalier {
namespace {

constexpr std::size_t kSystemPage = 4096;
std::size_t whole_pages(std::size_t bytes) { return (bytes + kSystemPage - 1) / kSystemPage * kSystemPage; }

std::byte* map(std::size_t bytes, int protection) {
  void* const memory = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return static_cast<std::byte*>(memory);
}

// What device memory there is; the host can touch none of it while nothing runs.
class DeviceMemory {
 public:
  void add(std::byte* begin, std::size_t bytes) {
    mprotect(begin, bytes, PROT_READ | PROT_WRITE);
    std::memset(begin, 0xff, bytes);
    if (!open_) mprotect(begin, bytes, PROT_NONE);
    blocks_[begin] = bytes;
  }
  void remove(std::byte* begin) {
    const auto block = blocks_.find(begin);
    ESPALIER_INTERNAL(block != blocks_.end(), "memory that is not this device's");
    mprotect(begin, block->second, PROT_NONE);
    madvise(begin, block->second, MADV_DONTNEED);
    blocks_.erase(block);
  }
  bool holds(const void* address) const {
    const auto* const at = static_cast<const std::byte*>(address);
    auto block = blocks_.upper_bound(const_cast<std::byte*>(at));
    if (block == blocks_.begin()) return false;
    --block;
    return at < block->first + block->second;
  }
  // Blocks behind each other are opened and closed together.
  void open(bool opens) {
    open_ = opens;
    for (auto block = blocks_.begin(); block != blocks_.end();) {
      std::byte* const begin = block->first;
      std::byte* end = begin;
      for (; block != blocks_.end() && block->first == end; ++block) end += block->second;
      mprotect(begin, static_cast<std::size_t>(end - begin), opens ? PROT_READ | PROT_WRITE : PROT_NONE);
    }
  }

 private:
  std::map<std::byte*, std::size_t> blocks_;
  bool open_ = false;
};

class Streams {
 public:
  DeviceMemory memory;

  void set_seed(unsigned seed) {
    run_until(record(cuda::Queue::compute));
    run_until(record(cuda::Queue::copy));
    seed_ = seed;
    random_.seed(seed);
  }
  void give(cuda::Queue queue, std::function<void()> work) {
    queue_of(queue).push_back({std::move(work), cuda::kNoEvent, false});
  }
  cuda::Event record(cuda::Queue queue) {
    happened_.push_back(-1);
    queue_of(queue).push_back({nullptr, last_event(), false});
    return last_event();
  }
  void wait(cuda::Queue queue, cuda::Event event) { queue_of(queue).push_back({nullptr, event, true}); }
  double time_of(cuda::Event event) const { return happened_.at(static_cast<std::size_t>(event)); }

  void run_until(cuda::Event event) {
    if (time_of(event) >= 0) return;
    memory.open(true);
    try {
      while (time_of(event) < 0) step();
    } catch (...) {
      memory.open(false);
      for (auto& queue : queues_) queue.clear();
      throw;
    }
    memory.open(false);
  }

 private:
  struct Entry {
    std::function<void()> work;
    cuda::Event event;  // to happen, or to wait for
    bool waits;
  };

  std::deque<Entry>& queue_of(cuda::Queue queue) { return queues_[queue == cuda::Queue::copy ? 1 : 0]; }
  cuda::Event last_event() const { return static_cast<cuda::Event>(happened_.size()) - 1; }
  bool ready(const std::deque<Entry>& queue) const {
    return !queue.empty() && !(queue.front().waits && time_of(queue.front().event) < 0);
  }

  void step() {
    std::size_t which = seed_ % 3 == 0 ? 0 : seed_ % 3 == 1 ? 1 : random_() % 2;
    if (!ready(queues_[which])) which = 1 - which;
    ESPALIER_INTERNAL(ready(queues_[which]), "streams that wait for each other, or for nothing");
    const Entry entry = std::move(queues_[which].front());
    queues_[which].pop_front();
    if (entry.work)
      entry.work();
    else if (!entry.waits)
      happened_[static_cast<std::size_t>(entry.event)] = Timer::steady_seconds();
  }

  std::array<std::deque<Entry>, 2> queues_;
  std::vector<double> happened_;  // seconds at which an event did, or -1
  unsigned seed_ = 2;
  std::mt19937 random_{2};
};

Streams& streams() {
  static auto* const one = new Streams;  // outlives every tensor
  return *one;
}

}  // namespace

namespace cuda {

Event record(Queue queue) { return streams().record(queue); }
void wait(Queue queue, Event event) { streams().wait(queue, event); }
void synchronize(Event event) { streams().run_until(event); }
void forget(Event) {}
double seconds_between(Event begin, Event end) {
  const double from = streams().time_of(begin), to = streams().time_of(end);
  ESPALIER_INTERNAL(from >= 0 && to >= 0, "the time of an event that has not happened");
  return to - from;
}

void copy(Queue queue, void* to, const void* from, std::size_t bytes) {
  copy_rows(queue, {to, bytes, from, bytes, bytes, 1});
}
void copy_rows(Queue queue, const CopiedRows& c) {
  if (!streams().memory.holds(c.to))
    for (std::size_t r = 0; r < c.rows; ++r)
      std::memset(static_cast<std::byte*>(c.to) + r * c.to_stride, 0xff, c.width);
  streams().give(queue, [c] {
    for (std::size_t r = 0; r < c.rows; ++r)
      std::memcpy(static_cast<std::byte*>(c.to) + r * c.to_stride,
                  static_cast<const std::byte*>(c.from) + r * c.from_stride, c.width);
  });
}

// Behind a page with its size; what is given back cannot be read any more.
void* take_pinned(std::size_t bytes) {
  const std::size_t all = kSystemPage + whole_pages(bytes + 1);
  std::byte* const memory = map(all, PROT_READ | PROT_WRITE);
  std::memcpy(memory, &all, sizeof(all));
  return std::memset(memory + kSystemPage, 0xff, bytes);
}
void give_back_pinned(void* memory) {
  std::byte* const begin = static_cast<std::byte*>(memory) - kSystemPage;
  std::size_t all = 0;
  std::memcpy(&all, begin, sizeof(all));
  munmap(begin, all);
}

std::int64_t page_bytes() { return std::int64_t{1} << 18; }
std::byte* reserve_addresses(std::int64_t bytes) { return map(static_cast<std::size_t>(bytes), PROT_NONE); }
void give_back_addresses(std::byte* memory, std::int64_t bytes) { munmap(memory, static_cast<std::size_t>(bytes)); }
Page take_page() {
  static Page last = kNoPage;
  return ++last;
}
void give_back_page(Page) {}
void map_page(Page, std::byte* at) { streams().memory.add(at, static_cast<std::size_t>(page_bytes())); }
void unmap_page(Page, std::byte* at) { streams().memory.remove(at); }
std::int64_t free_memory() { return available_bytes(); }

Stream stream() { return nullptr; }
void expect_launched(const char*) {}

// Ends where nobody may read on, at a multiple of 16 bytes.
void* take_scratch(std::size_t bytes) {
  const std::size_t used = std::max<std::size_t>(bytes + 15, 16) / 16 * 16, room = whole_pages(used);
  std::byte* const memory = map(room + kSystemPage, PROT_NONE);
  streams().memory.add(memory, room);
  return memory + room - used;
}
static std::byte* block_of(void* memory) {
  return reinterpret_cast<std::byte*>(reinterpret_cast<std::uintptr_t>(memory) / kSystemPage * kSystemPage);
}
void give_back_scratch(void* memory) {
  testing::give_to_compute([memory] { streams().memory.remove(block_of(memory)); });
}

void fill_zero(void* memory, std::size_t bytes) {
  testing::give_to_compute([=] { std::memset(memory, 0, bytes); });
}
void copy_on_device(void* to, const void* from, std::size_t bytes) { copy(Queue::compute, to, from, bytes); }
void copy_to_host(void* host, const void* memory, std::size_t bytes) {
  copy(Queue::compute, host, memory, bytes);
  synchronize(record(Queue::compute));
}

// The columns of a matrix [rows, columns] behind each other.
static at::Tensor columns_of(const void* data, std::int64_t rows, std::int64_t columns, std::int64_t ld,
                             at::ScalarType dtype) {
  return at::from_blob(const_cast<void*>(data), {rows, columns}, {1, ld}, at::TensorOptions().dtype(dtype));
}

static void product(const ColumnProduct& p) {
  const at::ScalarType sums = accumulator_type(p.in);
  const auto factor = [&](const void* data, std::int64_t rows, std::int64_t columns, std::int64_t ld, bool transpose) {
    const at::Tensor x =
        transpose ? columns_of(data, columns, rows, ld, p.in).t() : columns_of(data, rows, columns, ld, p.in);
    return x.to(sums);
  };
  at::Tensor sum = at::mm(factor(p.a, p.m, p.k, p.lda, p.transpose_a), factor(p.b, p.k, p.n, p.ldb, p.transpose_b));
  const at::Tensor c = columns_of(p.c, p.m, p.n, p.ldc, p.out);
  if (p.adds) sum += c.to(sums);
  c.copy_(sum);
}
void run_product(const ColumnProduct& p) {
  testing::give_to_compute([p] { product(p); });
}

}  // namespace cuda

namespace testing {
namespace {

struct ComputeStream {
  static void give(std::function<void()> work) { give_to_compute(std::move(work)); }
};

struct BindByEnvironment {
  BindByEnvironment() {
    const char* named = std::getenv("ESPALIER_TEST_DEVICE");
    if (named == nullptr) return;
    if (std::string_view(named) == "emulated") bind_device(emulated_device());
    if (std::string_view(named) == "streamed") bind_device(streamed_device());
  }
} const bind_by_environment;

}  // namespace

void set_stream_seed(unsigned seed) { streams().set_seed(seed); }
void give_to_compute(std::function<void()> work) { streams().give(cuda::Queue::compute, std::move(work)); }

Device& emulated_device() {
  emulation::take_launches(give_to_compute);
  static auto* const device = new cuda::CudaDevice(cuda::operations(), "emulated");  // outlives every tensor
  return *device;
}

Device& streamed_device() {
  static auto* const device = new cuda::CudaDevice(late_operations<ComputeStream>(), "streamed");
  return *device;
}

}  // namespace testing
}  // namespace espalier
