#include "espalier/device/arena.h"

#include <algorithm>
#include <iterator>

#include "espalier/base/error.h"
#include "espalier/device/scalar_type.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

namespace espalier {

Arena::Arena(std::int64_t limit_bytes, Device& device, int depth)
    : device_(device), limit_(limit_bytes), addresses_(depth * limit_bytes) {
  while (base_ == nullptr) try {
      base_ = device_.reserve(addresses_);
    } catch (const MemoryBudgetError&) {
      if (addresses_ == limit_) throw;
      addresses_ = std::max(limit_, addresses_ / 2);
    }
  ASAN_POISON_MEMORY_REGION(base_, limit_);
}

Arena::~Arena() {
  ASAN_UNPOISON_MEMORY_REGION(base_, addresses_);
  device_.release(base_, addresses_);
}

at::Tensor Arena::take(at::IntArrayRef sizes, at::ScalarType dtype) {
  std::int64_t bytes = static_cast<std::int64_t>(c10::elementSize(dtype));
  for (std::int64_t size : sizes) bytes *= size;
  bytes = arena_bytes(bytes);
  if (held() + bytes > limit_ || top_ + bytes > addresses_)
    throw MemoryBudgetError({"Arena", text_of("at most ", limit_, " bytes of activations"), text_of(held() + bytes),
                             "raise --memory-budget, lower --token-budget, or use --trunk-state recompute"});
  std::byte* data = base_ + top_;
  top_ += bytes;
  high_water_ = std::max(high_water_, held());
  touched_ = std::max(touched_, top_);
  ASAN_UNPOISON_MEMORY_REGION(data, bytes);
  return device_.view(data, sizes, dtype);
}

at::Tensor Arena::take(const BufferList& declared, BufferList::Place place, at::ScalarType dtype) {
  if (place.index < 0) return {};
  const Buffer& buffer = declared[place];
  const std::int64_t sizes[] = {buffer.rows, buffer.width};
  const at::ScalarType of_element = buffer.element == Element::activation    ? dtype
                                    : buffer.element == Element::accumulator ? accumulator_type(dtype)
                                                                             : at::kInt;
  return take(at::IntArrayRef(sizes, buffer.width == Buffer::kVector ? 1 : 2), of_element);
}

void Arena::release_to(std::int64_t mark) {
  ESPALIER_INTERNAL(mark <= top_, "mark ", mark, ", top ", top_);
  ASAN_POISON_MEMORY_REGION(base_ + mark, top_ - mark);
  top_ = mark;
  while (!sleeping_.empty() && sleeping_.back().end > mark) {
    ESPALIER_INTERNAL(sleeping_.back().begin >= mark, "mark ", mark, " inside a range that sleeps");
    asleep_ -= sleeping_.back().bytes();
    sleeping_.pop_back();
  }
}

void Arena::sleep(Range range) {
  if (range.bytes() == 0) return;  // of a set without rows: it would begin where the next one does
  const auto after = std::ranges::find_if(sleeping_, [&](const Range& other) { return other.begin >= range.end; });
  ESPALIER_INTERNAL(0 <= range.begin && range.begin <= range.end && range.end <= top_ &&
                        (after == sleeping_.begin() || std::prev(after)->end <= range.begin),
                    range.begin, " to ", range.end, ", top ", top_);
  device_.give_back(base_ + range.begin, range.bytes());
  ASAN_POISON_MEMORY_REGION(base_ + range.begin, range.bytes());
  sleeping_.insert(after, range);
  asleep_ += range.bytes();
}

void Arena::wake(Range range) {
  if (range.bytes() == 0) return;
  const auto found = std::ranges::find_if(sleeping_, [&](const Range& other) { return other.begin == range.begin; });
  ESPALIER_INTERNAL(found != sleeping_.end() && found->end == range.end, range.begin, " to ", range.end);
  asleep_ -= range.bytes();
  sleeping_.erase(found);
  high_water_ = std::max(high_water_, held());
  if (held() > limit_)
    throw MemoryBudgetError({"Arena", text_of("at most ", limit_, " bytes of activations"), text_of(held()),
                             "raise --memory-budget, or use --trunk-state recompute"});
  ASAN_UNPOISON_MEMORY_REGION(base_ + range.begin, range.bytes());
}

std::vector<Arena::Range> Arena::awake() const {
  std::vector<Range> out;
  std::int64_t begin = 0;
  const auto add = [&](std::int64_t end) {
    if (begin < end) out.push_back({begin, end});
  };
  for (const Range& range : sleeping_) {
    add(range.begin);
    begin = range.end;
  }
  add(top_);
  return out;
}

void Arena::trim() {
  ASAN_UNPOISON_MEMORY_REGION(base_ + top_, touched_ - top_);
  device_.give_back(base_ + top_, touched_ - top_);
  ASAN_POISON_MEMORY_REGION(base_ + top_, touched_ - top_);
  touched_ = top_;
}

}  // namespace espalier
