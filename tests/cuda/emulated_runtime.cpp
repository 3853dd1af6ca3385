#include "tests/cuda/emulated_runtime.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>

#include "espalier/base/error.h"
#include "espalier/device/scalar_type.h"
#include "espalier/machine/memory.h"
#include "espalier/metrics/timer.h"
#include "espalier/ops/cuda/chunk_trial.h"
#include "espalier/ops/cuda/device.h"
#include "espalier/ops/cuda/launch.h"
#include "espalier/ops/cuda/open_attention.h"
#include "espalier/ops/cuda/operations.h"
#include "espalier/ops/cuda/products.h"
#include "tests/cuda/accesses.h"
#include "tests/cuda/emulated_streams.h"
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

using testing::streams;

}  // namespace

namespace cuda {

Queue make_queue() { return streams().make_queue(); }
int connections() { return streams().connections(); }
Event record(Queue queue) { return streams().record(queue); }
void wait(Queue queue, Event event) { streams().wait(queue, event); }
static thread_local std::int64_t waits = 0;
void synchronize(Event event) {
  ++waits;
  streams().run_until(event);
}
// Streams of a GPU go on while the host asks.
bool happened(Event event) {
  streams().run_towards(event);
  return streams().time_of(event) >= 0;
}
void forget(Event event) { streams().forget(event); }
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

// CUDA may wait for the whole device to take or free pinned memory, and to unmap or free a page: for kernels of
// collectives too, whose other ranks may wait for this host.
static void expect_no_collective(const char* what) {
  ESPALIER_INTERNAL(!streams().meets_others(), text_of(what, " while a collective is under way"));
}

// Behind a page with its size; what is given back cannot be read any more.
void* take_pinned(std::size_t bytes) {
  expect_no_collective("pinned memory is taken");
  const std::size_t all = kSystemPage + whole_pages(bytes + 1);
  std::byte* const memory = map(all, PROT_READ | PROT_WRITE);
  std::memcpy(memory, &all, sizeof(all));
  return std::memset(memory + kSystemPage, 0xff, bytes);
}
void give_back_pinned(void* memory) {
  expect_no_collective("pinned memory is given back");
  std::byte* const begin = static_cast<std::byte*>(memory) - kSystemPage;
  std::size_t all = 0;
  std::memcpy(&all, begin, sizeof(all));
  munmap(begin, all);
}

std::int64_t page_bytes() { return std::int64_t{1} << 18; }
std::byte* reserve_addresses(std::int64_t bytes) {
  std::byte* const memory = map(static_cast<std::size_t>(bytes), PROT_NONE);
  streams().pages.reserve(memory, bytes);
  return memory;
}
void give_back_addresses(std::byte* memory, std::int64_t bytes) {
  streams().pages.free(memory, bytes);
  munmap(memory, static_cast<std::size_t>(bytes));
}
Page take_page() { return streams().pages.take(); }
void give_back_page(Page page) {
  expect_no_collective("a page is freed");
  streams().pages.give_back(page);
}
void map_page(Page page, std::byte* at) {
  streams().pages.map(page, at);
  streams().memory.add(at, static_cast<std::size_t>(page_bytes()));
}
void unmap_page(Page page, std::byte* at) {
  expect_no_collective("a page is unmapped");
  streams().pages.unmap(page, at);
  streams().memory.remove(at);
}
static thread_local std::int64_t most_free = std::numeric_limits<std::int64_t>::max();
std::int64_t free_memory() { return std::min(most_free, available_bytes()); }
std::int64_t held_memory() { return streams().memory.bytes(); }
bool on_device(const void* address) { return streams().memory.holds(address); }

Stream stream() { return nullptr; }
void expect_launched(const char*) {}
std::int64_t most_shared_bytes() { return static_cast<std::int64_t>(emulation::architecture().shared_bytes); }

// At a multiple of 16 bytes, where nobody may read on; kernels may touch no byte more.
void* take_scratch(std::size_t bytes) {
  const std::size_t used = std::max<std::size_t>(bytes + 15, 16) / 16 * 16, room = whole_pages(used);
  std::byte* const memory = map(room + kSystemPage, PROT_NONE);
  streams().memory.add(memory, room);
  emulation::add_array(memory, room, memory + room - used, bytes);
  return memory + room - used;
}
static std::byte* block_of(void* memory) {
  return reinterpret_cast<std::byte*>(reinterpret_cast<std::uintptr_t>(memory) / kSystemPage * kSystemPage);
}
void give_back_scratch(void* memory) {
  testing::give_to_compute([memory] {
    emulation::forget_array(block_of(memory));
    streams().memory.remove(block_of(memory));
  });
}

void fill_zero(void* memory, std::size_t bytes) {
  testing::give_to_compute([=] { std::memset(memory, 0, bytes); });
}
void copy_on_device(void* to, const void* from, std::size_t bytes) { copy(Queue::compute, to, from, bytes); }
void copy_to_host(void* host, const void* memory, std::size_t bytes) {
  copy(Queue::compute, host, memory, bytes);
  const Event copied = record(Queue::compute);
  synchronize(copied);
  forget(copied);
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

// As a GPU has it in bfloat16, by ATen; in float64 so that it is held to more digits. float32 goes one by one.
bool has_grouped_products(at::ScalarType dtype, std::int64_t k, std::int64_t n) {
  return dtype == at::kDouble || (dtype == at::kBFloat16 && k % 8 == 0 && n % 8 == 0);
}
static void grouped_product(const at::Tensor& out_RN, const at::Tensor& a_RK, const at::Tensor& b_EKN,
                            const at::Tensor& end_E) {
  if (out_RN.scalar_type() == at::kBFloat16) {
    out_RN.copy_(at::_grouped_mm(a_RK, b_EKN, end_E));
    return;
  }
  std::int64_t first = 0;
  for (std::int64_t e = 0; e < end_E.size(0); ++e) {
    const std::int64_t end = end_E[e].item<std::int32_t>();
    out_RN.narrow(0, first, end - first).copy_(at::mm(a_RK.narrow(0, first, end - first), b_EKN[e]));
    first = end;
  }
}
at::Tensor multiply_grouped(const at::Tensor& a_RK, const at::Tensor& b_EKN, const at::Tensor& end_E) {
  for (const at::Tensor& each : {a_RK, b_EKN})  // as ATen does on a GPU
    ESPALIER_INTERNAL(reinterpret_cast<std::uintptr_t>(each.data_ptr()) % 16 == 0,
                      "a grouped product's operand, aligned");
  const std::int64_t rows = a_RK.size(0), columns = b_EKN.size(2);
  const at::ScalarType dtype = a_RK.scalar_type();
  void* const memory = take_scratch(static_cast<std::size_t>(rows * columns) * c10::elementSize(dtype));
  const at::Tensor out_RN = at::from_blob(memory, {rows, columns}, give_back_scratch, at::TensorOptions().dtype(dtype));
  // Work that is queued owns no tensor: its memory goes when the caller's does, behind all that was queued before.
  const at::Tensor written = at::from_blob(memory, {rows, columns}, at::TensorOptions().dtype(dtype));
  testing::give_to_compute([=] { grouped_product(written, a_RK, b_EKN, end_E); });
  return out_RN;
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

void set_free_memory(std::int64_t bytes) { cuda::most_free = bytes; }
std::int64_t host_waits() { return cuda::waits; }
void give_to_compute(std::function<void()> work) { streams().give(cuda::Queue::compute, std::move(work)); }

// For every device with emulated kernels.
static void start_kernels() {
  emulation::take_launches(give_to_compute);
  cuda::trust_chunks(true);  // their tests compare them with float64
}

Device& emulated_device() {
  start_kernels();
  static auto* const device = new cuda::CudaDevice(cuda::operations(), "emulated");  // outlives every tensor
  return *device;
}

// With attention of these functions; outlives every tensor.
static Device& emulated_device_with(const AttentionOperations& attention) {
  auto* const changed = new Operations(cuda::operations());
  static_cast<AttentionOperations&>(*changed) = attention;
  return *new cuda::CudaDevice(*changed, "emulated");
}
Device& emulated_hopper_device() {
  start_kernels();
  static Device& device = emulated_device_with(cuda::open_hopper_attention({.major = 9, .minor = 0}));
  return device;
}
Device& emulated_hopper_split_device() {
  start_kernels();
  static Device& device = emulated_device_with(cuda::open_hopper_split_attention({.major = 9, .minor = 0}));
  return device;
}

namespace {

const std::thread::id first_thread = std::this_thread::get_id();

class StreamedDevice : public cuda::CudaDevice {
 public:
  StreamedDevice() : CudaDevice(late_operations<ComputeStream>(), "streamed") {}
  Device& of_thread() override { return streamed_device(); }
};

}  // namespace

Device& streamed_device() {
  static auto* const all = new std::vector<std::unique_ptr<StreamedDevice>>;  // outlive every tensor
  static auto* const mutex = new std::mutex;
  static thread_local StreamedDevice* const of_thread = [] {
    const std::lock_guard lock(*mutex);
    if (std::this_thread::get_id() != first_thread) make_streams_of_thread();
    return all->emplace_back(std::make_unique<StreamedDevice>()).get();
  }();
  return *of_thread;
}

}  // namespace testing
}  // namespace espalier
