#include "espalier/device/buffers.h"

#include <algorithm>

#include "espalier/base/error.h"

namespace espalier {

BufferList::Place BufferList::add_buffer(Buffer buffer) {
  ESPALIER_INTERNAL(count_ < kMostBuffers && 0 <= buffer.first && buffer.first <= buffer.last &&
                        buffer.last < kMostStages && buffer.rows >= 0,
                    "buffer ", buffer.name, ": number ", count_, ", stages ", buffer.first, " to ", buffer.last, ", ",
                    buffer.rows, " rows");
  for (const Buffer& below : buffers())  // the later one lies above it in every stage that they share
    ESPALIER_INTERNAL(below.first <= buffer.first ? buffer.first > below.last || buffer.last <= below.last
                                                  : buffer.last < below.first,
                      below.name, " and ", buffer.name, " do not end in the order of a stack");
  const std::int64_t numbers = buffer.width == Buffer::kVector ? buffer.rows : buffer.rows * buffer.width;
  buffer.bytes = arena_bytes(numbers * element_bytes_.of(buffer.element));
  buffers_[static_cast<std::size_t>(count_)] = buffer;
  return {count_++};
}

void BufferList::nest_bytes(int stage, std::int64_t bytes) {
  std::int64_t& most = nested_.at(static_cast<std::size_t>(stage));
  most = std::max(most, bytes);
}

std::int64_t BufferList::held(int stage) const {
  std::int64_t sum = 0;
  for (const Buffer& buffer : buffers())
    if (buffer.first <= stage && stage <= buffer.last) sum += buffer.bytes;
  return sum;
}

std::int64_t BufferList::peak() const {
  std::int64_t most = 0;
  for (int stage = 0; stage < kMostStages; ++stage)
    most = std::max(most, held(stage) + nested_[static_cast<std::size_t>(stage)]);
  return most;
}

}  // namespace espalier
