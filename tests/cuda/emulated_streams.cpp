#include "tests/cuda/emulated_streams.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>

#include "espalier/base/error.h"
#include "espalier/metrics/timer.h"
#include "tests/cuda/emulated_runtime.h"

namespace espalier::testing {
namespace {

unsigned first_seed = 2;  // of the threads that begin
int first_connections = 32;

// Words of memory that nobody has written: NaN as numbers of any type, more than any row or depth as whole ones.
constexpr std::uint32_t kUnwritten = 0x7fffffff;

}  // namespace

void DeviceMemory::add(std::byte* begin, std::size_t bytes) {
  mprotect(begin, bytes, PROT_READ | PROT_WRITE);
  std::fill_n(reinterpret_cast<std::uint32_t*>(begin), bytes / sizeof(std::uint32_t), kUnwritten);
  if (!open_) mprotect(begin, bytes, PROT_NONE);
  blocks_[begin] = bytes;
}

void DeviceMemory::remove(std::byte* begin) {
  const auto block = blocks_.find(begin);
  ESPALIER_INTERNAL(block != blocks_.end(), "memory that is not this device's");
  mprotect(begin, block->second, PROT_NONE);
  madvise(begin, block->second, MADV_DONTNEED);
  blocks_.erase(block);
}

bool DeviceMemory::holds(const void* address) const {
  const auto* const at = static_cast<const std::byte*>(address);
  auto block = blocks_.upper_bound(const_cast<std::byte*>(at));
  if (block == blocks_.begin()) return false;
  --block;
  return at < block->first + block->second;
}

std::int64_t DeviceMemory::bytes() const {
  std::int64_t sum = 0;
  for (const auto& [begin, bytes] : blocks_) sum += static_cast<std::int64_t>(bytes);
  return sum;
}

void DeviceMemory::open(bool opens) {
  open_ = opens;
  for (auto block = blocks_.begin(); block != blocks_.end();) {
    std::byte* const begin = block->first;
    std::byte* end = begin;
    for (; block != blocks_.end() && block->first == end; ++block) end += block->second;
    mprotect(begin, static_cast<std::size_t>(end - begin), opens ? PROT_READ | PROT_WRITE : PROT_NONE);
  }
}

void PageTable::reserve(std::byte* begin, std::int64_t bytes) { ranges_[begin] = bytes; }

void PageTable::free(std::byte* begin, std::int64_t bytes) {
  const auto range = ranges_.find(begin);
  ESPALIER_INTERNAL(range != ranges_.end() && range->second == bytes, "addresses that were not reserved as a range");
  const auto page = page_at_.lower_bound(begin);
  ESPALIER_INTERNAL(page == page_at_.end() || page->first >= begin + bytes, "addresses are given back with a page");
  ranges_.erase(range);
}

cuda::Page PageTable::take() {
  place_[++last_] = nullptr;
  return last_;
}

void PageTable::give_back(cuda::Page page) {
  const auto place = place_.find(page);
  ESPALIER_INTERNAL(place != place_.end(), "a page is given back that nobody has");
  ESPALIER_INTERNAL(place->second == nullptr, "a page is given back that is mapped");
  place_.erase(place);
}

void PageTable::map(cuda::Page page, std::byte* at) {
  const auto place = place_.find(page);
  ESPALIER_INTERNAL(place != place_.end(), "a page is mapped that nobody has");
  ESPALIER_INTERNAL(place->second == nullptr, "a page is mapped at two places");
  auto range = ranges_.upper_bound(at);
  ESPALIER_INTERNAL(range != ranges_.begin(), "a page is mapped outside of the reserved addresses");
  --range;
  ESPALIER_INTERNAL(
      at + cuda::page_bytes() <= range->first + range->second && (at - range->first) % cuda::page_bytes() == 0,
      "a page is mapped outside of the reserved addresses");
  ESPALIER_INTERNAL(page_at_.emplace(at, page).second, "a page is mapped where another one is");
  place->second = at;
}

void PageTable::unmap(cuda::Page page, std::byte* at) {
  const auto here = page_at_.find(at);
  ESPALIER_INTERNAL(here != page_at_.end() && here->second == page, "a page leaves a place where it is not");
  page_at_.erase(here);
  place_[page] = nullptr;
}

void EmulatedStreams::set_seed(unsigned seed) {
  for (std::size_t queue = 0; queue < queues_.size(); ++queue) {
    const cuda::Event all = record(static_cast<cuda::Queue>(queue));
    run_until(all);
    forget(all);
  }
  seed_ = seed;
  random_.seed(seed);
}

cuda::Queue EmulatedStreams::make_queue() {
  queues_.emplace_back();
  return static_cast<cuda::Queue>(queues_.size() - 1);
}

void EmulatedStreams::give(cuda::Queue queue, std::function<void()> work) { add(queue, {.work = std::move(work)}); }

void EmulatedStreams::give(cuda::Queue queue, Remote remote) {
  add(queue, {.remote = std::make_shared<Remote>(std::move(remote))});
}

cuda::Event EmulatedStreams::record(cuda::Queue queue) {
  if (free_.empty()) {
    free_.push_back(static_cast<cuda::Event>(moments_.size()));
    moments_.push_back(0);
    forgotten_.push_back(true);
  }
  const cuda::Event event = free_.back();
  free_.pop_back();
  const auto number = static_cast<std::size_t>(event);
  moments_[number] = happened_.size(), forgotten_[number] = false;
  add(queue, {.moment = happened_.size()});
  happened_.push_back(-1);
  return event;
}

void EmulatedStreams::forget(cuda::Event event) {
  (void)moment_of(event);
  forgotten_[static_cast<std::size_t>(event)] = true;
  free_.push_back(event);
}

std::size_t EmulatedStreams::moment_of(cuda::Event event) const {
  const auto number = static_cast<std::size_t>(event);
  ESPALIER_INTERNAL(event >= 0 && number < moments_.size(), "an event that was not recorded");
  ESPALIER_INTERNAL(!forgotten_[number], "an event that was forgotten");
  return moments_[number];
}

void EmulatedStreams::wait(cuda::Queue queue, cuda::Event event) {
  add(queue, {.moment = moment_of(event), .waits = true});
}

bool EmulatedStreams::meets_others() const {
  for (const auto& queue : queues_)
    for (const Entry& entry : queue)
      if (entry.remote) return true;
  return false;
}

bool EmulatedStreams::idle() const {
  for (const auto& queue : queues_)
    if (!queue.empty()) return false;
  return true;
}

template <class Work>
void EmulatedStreams::opened(Work&& work) {
  memory.open(true);
  try {
    work();
  } catch (...) {
    memory.open(false);
    drop_all();
    throw;
  }
  memory.open(false);
}

// Nobody waits for it any more.
void EmulatedStreams::drop_all() {
  for (auto& queue : queues_) {
    for (const Entry& entry : queue)
      if (!entry.work && !entry.remote && !entry.waits) happened_[entry.moment] = Timer::steady_seconds();
    queue.clear();
  }
}

void EmulatedStreams::run_until(cuda::Event event) {
  if (time_of(event) >= 0) return;
  opened([&] {
    while (time_of(event) < 0)
      if (!run_one()) std::this_thread::sleep_for(std::chrono::microseconds(20));
  });
}

void EmulatedStreams::run_towards(cuda::Event event) {
  if (time_of(event) >= 0) return;
  opened([&] {
    while (time_of(event) < 0 && run_one()) {
    }
  });
}

bool EmulatedStreams::step() {
  bool ran = false;
  opened([&] { ran = run_one(); });
  return ran;
}

void EmulatedStreams::add(cuda::Queue queue, Entry entry) {
  entry.number = given_++;
  queue_of(queue).push_back(std::move(entry));
}

bool EmulatedStreams::is_first_of_connection(std::size_t queue) const {
  const auto step = static_cast<std::size_t>(connections_);
  for (std::size_t other = queue % step; other < queues_.size(); other += step)
    if (!queues_[other].empty() && queues_[other].front().number < queues_[queue].front().number) return false;
  return true;
}

EmulatedStreams::State EmulatedStreams::state_of(std::size_t queue) const {
  if (queues_[queue].empty()) return State::empty;
  const Entry& front = queues_[queue].front();
  if (!is_first_of_connection(queue)) return State::blocked;
  if (front.waits && happened_[front.moment] < 0) return State::blocked;
  if (!front.under_way) return State::ready;
  return front.under_way->wait_for(std::chrono::seconds(0)) == std::future_status::ready ? State::ready
                                                                                         : State::under_way;
}

// Runs one piece of the work that can run: the first stream's, the last one's, or any, as the seed says.
bool EmulatedStreams::run_one() {
  std::vector<std::size_t> ready;
  bool under_way = false;
  for (std::size_t queue = 0; queue < queues_.size(); ++queue) {
    const State state = state_of(queue);
    if (state == State::ready) ready.push_back(queue);
    under_way = under_way || state == State::under_way;
  }
  if (ready.empty()) {
    ESPALIER_INTERNAL(under_way, "streams that wait for each other, or for nothing");
    return false;
  }
  const std::size_t which = seed_ % 3 == 0   ? ready.front()
                            : seed_ % 3 == 1 ? ready.back()
                                             : ready[random_() % ready.size()];
  run_front(queues_[which]);
  return true;
}

void EmulatedStreams::run_front(std::deque<Entry>& queue) {
  if (queue.front().remote) return run_remote(queue);
  const Entry entry = std::move(queue.front());
  queue.pop_front();
  if (entry.work)
    entry.work();
  else if (!entry.waits)
    happened_[entry.moment] = Timer::steady_seconds();
}

void EmulatedStreams::run_remote(std::deque<Entry>& queue) {
  Entry& front = queue.front();
  if (!front.under_way) {
    front.remote->begin();
    front.under_way = std::make_shared<std::future<void>>(std::async(std::launch::async, front.remote->call));
    return;
  }
  const Entry entry = std::move(front);
  queue.pop_front();
  entry.under_way->get();
  entry.remote->end();
}

namespace {

thread_local EmulatedStreams* of_thread = nullptr;

EmulatedStreams& make_streams() {
  static auto* const all = new std::vector<std::unique_ptr<EmulatedStreams>>;  // outlive every tensor
  static auto* const mutex = new std::mutex;
  const std::lock_guard lock(*mutex);
  EmulatedStreams& made = *all->emplace_back(std::make_unique<EmulatedStreams>(first_seed));
  made.set_connections(first_connections);
  return made;
}

}  // namespace

EmulatedStreams& streams() {
  static EmulatedStreams& of_process = make_streams();
  return of_thread != nullptr ? *of_thread : of_process;
}

void make_streams_of_thread() { of_thread = &make_streams(); }

void set_stream_connections(int connections) {
  first_connections = connections;
  streams().set_connections(connections);
}

void set_stream_seed(unsigned seed) {
  first_seed = seed;
  streams().set_seed(seed);
}

}  // namespace espalier::testing
