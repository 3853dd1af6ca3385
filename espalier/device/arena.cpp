#include "espalier/device/arena.h"

#include <algorithm>

#include "espalier/base/error.h"
#include "espalier/device/scalar_type.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

namespace espalier {

Arena::Arena(std::int64_t limit_bytes, Device& device)
    : device_(device), base_(device.reserve(limit_bytes)), limit_(limit_bytes) {
  ASAN_POISON_MEMORY_REGION(base_, limit_);
}

Arena::~Arena() {
  ASAN_UNPOISON_MEMORY_REGION(base_, limit_);
  device_.release(base_, limit_);
}

at::Tensor Arena::take(at::IntArrayRef sizes, at::ScalarType dtype) {
  std::int64_t bytes = static_cast<std::int64_t>(c10::elementSize(dtype));
  for (std::int64_t size : sizes) bytes *= size;
  bytes = arena_bytes(bytes);
  if (top_ + bytes > limit_)
    throw MemoryBudgetError({"Arena", text_of("at most ", limit_, " bytes of activations"), text_of(top_ + bytes),
                             "raise --memory-budget, lower --token-budget, or use --trunk-state recompute"});
  std::byte* data = base_ + top_;
  top_ += bytes;
  high_water_ = std::max(high_water_, top_);
  touched_ = std::max(touched_, top_);
  ASAN_UNPOISON_MEMORY_REGION(data, bytes);
  return device_.view(data, sizes, dtype);
}

at::Tensor Arena::take(const BufferList& declared, BufferList::Place place, at::ScalarType dtype) {
  if (place.index < 0) return {};
  const Buffer& buffer = declared[place];
  const std::int64_t sizes[] = {buffer.rows, buffer.width};
  const at::ScalarType of_element = buffer.element == Element::activation ? dtype
                                    : buffer.element == Element::sum      ? accumulator_type(dtype)
                                                                          : at::kInt;
  return take(at::IntArrayRef(sizes, buffer.width == Buffer::kVector ? 1 : 2), of_element);
}

void Arena::release_to(std::int64_t mark) {
  ESPALIER_INTERNAL(mark <= top_, "mark ", mark, ", top ", top_);
  ASAN_POISON_MEMORY_REGION(base_ + mark, top_ - mark);
  top_ = mark;
}

}  // namespace espalier
