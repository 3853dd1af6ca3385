#include "espalier/ops/cuda/device.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>

#include "espalier/base/error.h"
#include "espalier/metrics/timer.h"
#include "espalier/ops/cuda/collectives.h"
#include "espalier/ops/cuda/device_group.h"
#include "espalier/ops/cuda/launch.h"

namespace espalier::cuda {
namespace {

constexpr std::size_t kStagedBytes = std::size_t{16} << 20;  // at most, at a time
// Memory that stays free when a page is taken because others cannot leave yet: for libraries and scratch.
constexpr std::int64_t kReserve = std::int64_t{1} << 30;
// Room for results that ranks bring to their hosts while collectives are under way.
constexpr std::size_t kLandings = 4, kLandingBytes = std::size_t{1} << 20;

std::size_t bytes_of(at::IntArrayRef sizes, at::ScalarType dtype) {
  return static_cast<std::size_t>(c10::multiply_integers(sizes)) * c10::elementSize(dtype);
}

std::int64_t whole_pages(std::int64_t bytes) { return ceil_div(bytes < 1 ? 1 : bytes, page_bytes()) * page_bytes(); }

// A tensor's memory: rows of contiguous bytes at a stride; one row where all of it is contiguous.
struct Layout {
  std::size_t rows, width, stride;
};
Layout layout_of(const at::Tensor& x) {
  const auto bytes = static_cast<std::size_t>(x.numel() * x.element_size());
  if (x.is_contiguous()) return {1, bytes, bytes};
  ESPALIER_INTERNAL(x.select(0, 0).is_contiguous(), "a copy of rows that are not contiguous");
  const auto rows = static_cast<std::size_t>(x.size(0));
  return {rows, bytes / rows, static_cast<std::size_t>(x.stride(0) * x.element_size())};
}

}  // namespace

PinnedMemory::~PinnedMemory() {
  if (memory_ != nullptr) give_back_pinned(memory_);
}

std::byte* PinnedMemory::of(std::size_t bytes) {
  if (bytes > bytes_) {
    unfinished().check();
    if (!unfinished().empty()) {
      pageable_.resize(bytes);
      return here_ = pageable_.data();
    }
    if (memory_ != nullptr) give_back_pinned(memory_);
    memory_ = nullptr, bytes_ = 0;
    memory_ = take_pinned(bytes);
    bytes_ = bytes;
    pageable_ = {};
  }
  return here_ = static_cast<std::byte*>(memory_);
}

void CudaDevice::wait_and_forget(Event event) {
  wait_until(event);
  forget(event);
}

void CudaDevice::synchronize() { wait_and_forget(record(Queue::compute)); }

std::int64_t CudaDevice::free_bytes() {
  free_leaving();
  return free_memory();
}

// Pages that are leaving belong to nobody.
std::int64_t CudaDevice::held_bytes() {
  return held_memory() - static_cast<std::int64_t>(leaving_.size()) * page_bytes();
}

double CudaDevice::seconds() {
  synchronize();
  return Timer::steady_seconds();
}

// The host's clock stands still in a moment of a GPU.
Device::Moment CudaDevice::moment() { return {0, record(Queue::compute)}; }

double CudaDevice::seconds_between(const Moment& begin, const Moment& end) {
  wait_until(end.event);
  const double seconds = cuda::seconds_between(begin.event, end.event);
  forget(begin.event);
  forget(end.event);
  return seconds;
}

// ---- reserved addresses ----

std::byte* CudaDevice::reserve(std::int64_t bytes) {
  std::byte* const memory = reserve_addresses(whole_pages(bytes));
  ranges_[memory].pages.resize(static_cast<std::size_t>(whole_pages(bytes) / page_bytes()), kNoPage);
  return memory;
}

void CudaDevice::release(std::byte* memory, std::int64_t bytes) {
  give_back(memory, whole_pages(bytes));
  try {
    free_leaving();
  } catch (const CommunicationError&) {  // a wait for results reports it; work under way has ended
    free_leaving();
  }
  ranges_.erase(memory);
  give_back_addresses(memory, whole_pages(bytes));
}

void CudaDevice::give_back(std::byte* memory, std::int64_t bytes) {
  const auto [begin, range] = range_of(memory);
  const std::int64_t offset = memory - begin;
  for (std::int64_t page = ceil_div(offset, page_bytes()); (page + 1) * page_bytes() <= offset + bytes; ++page) {
    Page& here = range->pages[static_cast<std::size_t>(page)];
    if (here == kNoPage) continue;
    leaving_.push_back({here, begin + page * page_bytes(), record(Queue::compute)});
    here = kNoPage;
  }
}

// Memory that queued work may use stays where it is until that work has run: a page leaves its addresses as late as it
// is wanted elsewhere.
Page CudaDevice::next_page() {
  if (leaving_.empty()) return take_page();
  wait_for_all_but_sends();
  // A send may have to wait for what this host does next, so a new page serves as long as there is memory.
  if (!unfinished().empty() && free_memory() > kReserve) return take_page();
  wait_for_collectives();
  return oldest_leaving();
}

Page CudaDevice::oldest_leaving() {
  const Leaving oldest = leaving_.front();
  wait_and_forget(oldest.used);
  leaving_.pop_front();
  unmap_page(oldest.page, oldest.at);
  return oldest.page;
}

void CudaDevice::free_leaving() {
  if (!leaving_.empty()) wait_for_collectives();
  while (!leaving_.empty()) give_back_page(oldest_leaving());
}

void CudaDevice::map_pages(const std::byte* memory, std::int64_t bytes) {
  const auto [begin, range] = range_of(memory);
  const std::int64_t offset = memory - begin;
  for (std::int64_t page = offset / page_bytes(); page * page_bytes() < offset + bytes; ++page) {
    Page& here = range->pages[static_cast<std::size_t>(page)];
    if (here != kNoPage) continue;
    std::byte* const at = begin + page * page_bytes();
    // Addresses that a page is about to leave take that page again: for the compute stream all is in order, and the
    // copy stream waits.
    const auto same = std::ranges::find_if(leaving_, [at](const Leaving& leaving) { return leaving.at == at; });
    if (same != leaving_.end()) {
      wait(Queue::copy, same->used);
      forget(same->used);
      here = same->page;
      leaving_.erase(same);
      continue;
    }
    here = next_page();
    map_page(here, at);
  }
}

std::pair<std::byte*, CudaDevice::Range*> CudaDevice::range_of(const std::byte* memory) {
  const auto range = std::prev(ranges_.upper_bound(const_cast<std::byte*>(memory)));
  return {range->first, &range->second};
}

void CudaDevice::copy_out(const std::byte* memory, std::int64_t bytes, std::byte* host) {
  const Event computed = record(Queue::compute);
  wait(Queue::copy, computed);
  copy(Queue::copy, host, memory, static_cast<std::size_t>(bytes));
  forget(computed);
  wait_and_forget(record(Queue::copy));
}

// While the work given before it runs.
void CudaDevice::copy_in(const std::byte* host, std::int64_t bytes, std::byte* memory) {
  map_pages(memory, bytes);
  copy(Queue::copy, memory, host, static_cast<std::size_t>(bytes));
  wait_and_forget(record(Queue::copy));
}

std::byte* CudaDevice::take_host_memory(std::int64_t bytes) {
  wait_for_collectives();
  return static_cast<std::byte*>(take_pinned(static_cast<std::size_t>(bytes)));
}
void CudaDevice::give_back_host_memory(std::byte* memory, std::int64_t) {
  try {
    wait_for_collectives();
  } catch (const CommunicationError&) {  // what is under way has ended
  }
  give_back_pinned(memory);
}

at::Tensor CudaDevice::view(std::byte* memory, at::IntArrayRef sizes, at::ScalarType dtype) {
  map_pages(memory, static_cast<std::int64_t>(bytes_of(sizes, dtype)));
  return at::from_blob(memory, sizes, at::TensorOptions().dtype(dtype));
}

at::Tensor CudaDevice::allocate(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::from_blob(take_scratch(bytes_of(sizes, dtype)), sizes, give_back_scratch,
                       at::TensorOptions().dtype(dtype));
}

bool CudaDevice::holds(const at::Tensor& tensor) const {
  const auto* const memory = static_cast<const std::byte*>(tensor.storage().data());
  auto range = ranges_.upper_bound(const_cast<std::byte*>(memory));
  if (range == ranges_.begin()) return on_device(memory);
  --range;
  const auto bytes = static_cast<std::int64_t>(range->second.pages.size()) * page_bytes();
  return memory < range->first + bytes || on_device(memory);
}

// Pinned memory is taken before collectives are under way.
std::shared_ptr<Group> CudaDevice::connect(std::shared_ptr<Group> host, double timeout) {
  for (Staging& block : staging_)
    if (block.copied == kNoEvent) block.memory.of(kStagedBytes);
  while (landings_.size() < kLandings) landings_.emplace_back();
  for (Landing& landing : landings_)
    if (landing.free) landing.memory.of(kLandingBytes);
  return std::make_shared<DeviceGroup>(std::move(host), timeout, *this);
}

// ---- the declared copies ----

Device::Coming CudaDevice::start_to_host(const at::Tensor& tensor) {
  Coming coming{host_room(tensor)};
  if (tensor.numel() == 0) return coming;
  const auto found = std::ranges::find_if(landings_, [](const Landing& landing) { return landing.free; });
  Landing& landing = found != landings_.end() ? *found : landings_.emplace_back();
  coming.landing = std::ranges::find(landings_, &landing, [](Landing& each) { return &each; }) - landings_.begin();
  const Layout layout = layout_of(tensor);
  std::byte* const memory = landing.memory.of(layout.rows * layout.width);
  landing.free = false;
  const Event computed = record(Queue::compute);
  wait(Queue::copy, computed);
  copy_rows(Queue::copy, {memory, layout.width, tensor.data_ptr(), layout.stride, layout.width, layout.rows});
  forget(computed);
  landing.copied = record(Queue::copy);
  return coming;
}

at::Tensor CudaDevice::arrived(const Coming& coming) {
  if (coming.landing < 0) return coming.host;
  Landing& landing = landings_[static_cast<std::size_t>(coming.landing)];
  wait_and_forget(landing.copied);
  const std::size_t bytes = coming.host.nbytes();
  std::memcpy(coming.host.data_ptr(), landing.memory.here(), bytes);
  landing.free = true;
  return coming.host;
}

at::Tensor CudaDevice::host_room(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.scalar_type()));
}

// A block that nobody reads any more.
std::byte* CudaDevice::staged(std::size_t bytes) {
  Staging& block = staging_[turn_];
  if (block.copied != kNoEvent) wait_and_forget(block.copied);
  block.copied = kNoEvent;
  return block.memory.of(bytes);
}

void CudaDevice::sent() {
  staging_[turn_].copied = record(Queue::compute);
  turn_ = (turn_ + 1) % staging_.size();
}

void CudaDevice::to_device(const at::Tensor& host, const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  const at::Tensor values = host.contiguous();
  const auto* from = static_cast<const std::byte*>(values.data_ptr());
  auto* to = static_cast<std::byte*>(tensor.data_ptr());
  const Layout layout = layout_of(tensor);
  const std::size_t most = layout.rows == 1 ? layout.rows : std::max<std::size_t>(1, kStagedBytes / layout.width);
  for (std::size_t row = 0; row < layout.rows; row += most) {
    const std::size_t rows = std::min(most, layout.rows - row);
    for (std::size_t at = 0; at < layout.width; at += kStagedBytes) {
      const std::size_t width = std::min(kStagedBytes, layout.width - at);
      std::byte* const block = staged(rows * width);
      for (std::size_t r = 0; r < rows; ++r)
        std::memcpy(block + r * width, from + (row + r) * layout.width + at, width);
      copy_rows(Queue::compute, {to + row * layout.stride + at, layout.stride, block, width, width, rows});
      sent();
    }
  }
}

at::Tensor CudaDevice::adopt(const at::Tensor& host) {
  const at::Tensor tensor = allocate(host.sizes(), host.scalar_type());
  to_device(host, tensor);
  return tensor;
}

}  // namespace espalier::cuda
