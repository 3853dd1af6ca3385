#include "tests/cuda/calls/recorder.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

namespace espalier::testing {
namespace {

std::uintptr_t number(const void* at) { return reinterpret_cast<std::uintptr_t>(at); }

// A handle that no other has.
void* new_handle() {
  static std::uintptr_t last = 0x1000;
  return reinterpret_cast<void*>(last += 16);
}

}  // namespace

Recorder& Recorder::one() {
  static auto* const recorder = new Recorder;
  return *recorder;
}

std::int64_t Recorder::calls(const std::string& name) const {
  const auto found = calls_.find(name);
  return found == calls_.end() ? 0 : found->second;
}

void Recorder::join(Clock& clock, const Clock& other) {
  for (const auto& [actor, time] : other) clock[actor] = std::max(clock[actor], time);
}

bool Recorder::knows(const Clock& clock, const Access& access) {
  const auto found = clock.find(access.actor);
  return found != clock.end() && found->second >= access.time;
}

// Copies that the host knows to have run lie at their target from now on.
void Recorder::learn(const Clock& clock) {
  join(host_, clock);
  std::erase_if(deliveries_, [&](const Delivery& delivery) {
    if (!knows(host_, {0, 0, delivery.stream, delivery.time, false, false})) return false;
    std::copy(delivery.bytes.begin(), delivery.bytes.end(), delivery.to);
    return true;
  });
}

std::int64_t Recorder::step(void* stream) {
  Clock& clock = clocks_.at(stream);
  join(clock, host_);
  return ++clock[stream];
}

// ---- streams and events ----

void* Recorder::make_stream() {
  void* const stream = new_handle();
  clocks_[stream][stream] = 0;
  return stream;
}
void* Recorder::make_event() {
  void* const event = new_handle();
  events_[event] = {};
  return event;
}
void Recorder::record(void* event, void* stream) {
  step(stream);
  expect(events_.count(event) > 0, "an event is recorded that nobody made");
  events_[event] = {true, clocks_.at(stream)};
}
Recorder::Event& Recorder::known(void* event, const std::string& what) {
  Event& found = events_[event];
  expect(found.recorded, what + " an event that was not recorded");
  return found;
}
void Recorder::wait(void* stream, void* event) {
  step(stream);
  join(clocks_.at(stream), known(event, "a stream waits for").clock);
}
void Recorder::synchronize(void* event) { learn(known(event, "the host waits for").clock); }
bool Recorder::happened(void* event) {
  learn(known(event, "the host asks for").clock);
  return true;
}
void Recorder::time_between(void* begin, void* end) {
  for (void* const event : {begin, end})
    for (const auto& [actor, time] : known(event, "the host asks for the time of").clock)
      expect(knows(host_, {0, 0, actor, time, false, false}), "the time of an event that may not have happened");
}

// ---- memory ----

const Recorder::Block* Recorder::block_of(const void* at) const {
  auto block = device_.upper_bound(number(at));
  if (block == device_.begin()) return nullptr;
  --block;
  return number(at) < block->first + block->second.bytes ? &block->second : nullptr;
}
bool Recorder::on_device(const void* at) const { return block_of(at) != nullptr; }

// Tensors may lie in several pages.
void Recorder::expect_there(const void* at, std::size_t bytes, const std::string& what) {
  for (std::uintptr_t now = number(at); now < number(at) + bytes;) {
    const Block* const block = block_of(reinterpret_cast<void*>(now));
    if (block == nullptr) return expect(false, what + " memory that is not there");
    expect(block->readable, what + " a page that may not be used yet");
    now = std::prev(device_.upper_bound(now))->first + block->bytes;
  }
}

void Recorder::access(const void* actor, std::int64_t time, const void* at, std::size_t bytes, bool writes,
                      bool of_collective) {
  const std::uintptr_t begin = number(at), end = begin + bytes;
  const Clock& clock = actor == nullptr ? host_ : clocks_.at(actor);
  for (const Access& earlier : accesses_)
    if (earlier.begin < end && begin < earlier.end && (writes || earlier.writes) && earlier.actor != actor)
      expect(knows(clock, earlier), "memory is " + std::string(writes ? "written" : "read") + " while other work may " +
                                        (earlier.writes ? "write" : "read") + " it");
  accesses_.push_back({begin, end, actor, time, writes, of_collective});
}

void Recorder::expect_unused(const Clock& clock, const void* at, std::size_t bytes, const std::string& what) {
  const std::uintptr_t begin = number(at), end = begin + bytes;
  for (const Access& earlier : accesses_)
    if (earlier.begin < end && begin < earlier.end) expect(knows(clock, earlier), what + " while work may use it");
  std::erase_if(accesses_, [&](const Access& access) { return begin <= access.begin && access.end <= end; });
}

void Recorder::expect_no_collective(const std::string& what) {
  for (const Access& access : accesses_)
    if (access.of_collective) expect(knows(host_, access), "pinned memory is " + what + " while a collective may run");
}

void* Recorder::take(Place place, std::size_t bytes) {
  if (place == Place::pinned) expect_no_collective("taken");
  auto* const memory = static_cast<std::byte*>(::operator new (bytes, std::align_val_t{512}));
  std::memset(memory, 0xff, bytes);
  if (place == Place::pinned)
    pinned_[number(memory)] = bytes;
  else
    device_[number(memory)] = {bytes, true, 0};
  return memory;
}

void Recorder::give_back(Place place, void* memory) {
  if (place != Place::pinned) return give_back_in(nullptr, memory);
  expect_no_collective("freed");
  const auto block = pinned_.find(number(memory));
  if (block == pinned_.end()) return expect(false, "pinned memory is freed that nobody has");
  expect_unused(host_, memory, block->second, "pinned memory is freed");
  pinned_.erase(block);
}

// The memory stays, so that a late access is a violation and not the end.
void Recorder::give_back_in(void* stream, void* memory) {
  if (stream != nullptr) step(stream);
  const auto block = device_.find(number(memory));
  if (block == device_.end() || block->second.page != 0) return expect(false, "scratch is freed that nobody has");
  expect_unused(stream != nullptr ? clocks_.at(stream) : host_, memory, block->second.bytes, "scratch is freed");
  device_.erase(block);
}

void* Recorder::reserve(std::size_t bytes) {
  void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  addresses_[number(at)] = bytes;
  return at;
}
void Recorder::free_addresses(void* at, std::size_t bytes) {
  const auto range = addresses_.find(number(at));
  expect(range != addresses_.end() && range->second == bytes, "addresses are freed that are no reserved range");
  const auto page = device_.lower_bound(number(at));
  expect(page == device_.end() || page->first >= number(at) + bytes, "addresses are freed with a page");
  if (range != addresses_.end()) addresses_.erase(range);
}
std::uint64_t Recorder::make_page() {
  const std::uint64_t page = pages_.size() + released_.size() + 1;
  pages_[page] = 0;
  return page;
}
void Recorder::release(std::uint64_t page) {
  const auto found = pages_.find(page);
  if (found == pages_.end()) return expect(false, "a page is released that nobody has");
  expect(found->second == 0, "a page is released that is mapped");
  released_.insert(page);
  pages_.erase(found);
}
void Recorder::map(void* at, std::size_t bytes, std::uint64_t page) {
  const auto found = pages_.find(page);
  if (found == pages_.end()) return expect(false, "a page is mapped that nobody has");
  expect(found->second == 0, "a page is mapped at two places");
  expect(block_of(at) == nullptr, "a page is mapped where another one is");
  const auto range = addresses_.upper_bound(number(at));
  expect(range != addresses_.begin() && number(at) + bytes <= std::prev(range)->first + std::prev(range)->second,
         "a page is mapped outside of reserved addresses");
  found->second = number(at);
  device_[number(at)] = {bytes, false, page};
}
void Recorder::allow(void* at, std::size_t bytes) {
  const auto block = device_.find(number(at));
  expect(block != device_.end() && block->second.bytes == bytes, "access is allowed to what is no page");
  if (block != device_.end()) block->second.readable = true;
}
void Recorder::unmap(void* at, std::size_t bytes) {
  const auto block = device_.find(number(at));
  if (block == device_.end() || block->second.page == 0) return expect(false, "a page is unmapped where none is");
  expect_unused(host_, at, bytes, "a page is unmapped");
  pages_[block->second.page] = 0;
  device_.erase(block);
}

void Recorder::copy(void* stream, void* to, std::size_t to_stride, const void* from, std::size_t from_stride,
                    std::size_t width, std::size_t rows) {
  const std::size_t to_bytes = (rows - 1) * to_stride + width, from_bytes = (rows - 1) * from_stride + width;
  const bool from_device = on_device(from), to_device = on_device(to);
  if (from_device) expect_there(from, from_bytes, "a copy reads");
  if (to_device) expect_there(to, to_bytes, "a copy writes");
  expect(from_device || to_device, "a copy between places of the host");
  // The host filled its side before it gave the copy.
  if (!from_device) access(nullptr, ++host_[nullptr], from, from_bytes, true);
  const std::int64_t time = step(stream);
  access(stream, time, from, from_bytes, false);
  access(stream, time, to, to_bytes, true);
  for (std::size_t r = 0; r < rows; ++r) {
    const auto* const source = static_cast<const std::byte*>(from) + r * from_stride;
    std::byte* const target = static_cast<std::byte*>(to) + r * to_stride;
    if (to_device) {
      std::memcpy(target, source, width);
      continue;
    }
    deliveries_.push_back({stream, time, target, {source, source + width}});
    std::memset(target, 0xff, width);
  }
}

void Recorder::zero(void* stream, void* to, std::size_t bytes) {
  expect_there(to, bytes, "zeros overwrite");
  access(stream, step(stream), to, bytes, true);
  std::memset(to, 0, bytes);
}

// ---- NCCL ----

void* Recorder::make_communicator() {
  void* const communicator = new_handle();
  communicators_[communicator] = {};
  return communicator;
}
void Recorder::group(int change) {
  groups_ += change;
  expect(groups_ >= 0 && groups_ <= 1, "groups of NCCL calls that do not pair");
  for (auto& [handle, communicator] : communicators_) {
    if (change < 0 && communicator.used) communicator.busy = true;
    communicator.used = false;
  }
}
void Recorder::call_done() {
  for (auto& [handle, communicator] : communicators_) communicator.busy = false;
}
void Recorder::end_communicator(void* handle, bool finalizes) {
  Communicator& communicator = communicators_[handle];
  expect(communicator.live, "a communicator ends twice");
  expect(!communicator.busy, "a communicator ends while a call of it is under way");
  if (finalizes)
    communicator.finalized = communicator.busy = true;
  else
    communicator.live = false;
}
void Recorder::collective(void* handle, void* stream, const void* from, std::size_t from_bytes, void* to,
                          std::size_t to_bytes) {
  Communicator& communicator = communicators_[handle];
  expect(communicator.live && !communicator.finalized, "a communicator is used after its end");
  expect(!communicator.busy, "a communicator is used while a call of it is under way");
  expect(groups_ == 1, "a collective outside of a group");
  communicator.used = true;
  const std::int64_t time = step(stream);
  if (from != nullptr) {
    expect_there(from, from_bytes, "a collective reads");
    access(stream, time, from, from_bytes, false, true);
  }
  if (to != nullptr) {
    expect_there(to, to_bytes, "a collective writes");
    access(stream, time, to, to_bytes, true, true);
    if (from != nullptr && from != to) std::memcpy(to, from, std::min(from_bytes, to_bytes));
  }
}

}  // namespace espalier::testing
