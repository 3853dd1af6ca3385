// The buffers of a running block, declared as data: the arena allocates them, the planner adds up their bytes.
//
// A block runs in block stages. A buffer is held from the first to the last stage that needs it; buffers that begin in
// a stage are taken in the order of their declaration. The arena is a stack: the last buffer to begin ends first.
//
// The planner makes very many of these lists, so adding a buffer costs a few additions only.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "espalier/base/dtype.h"
#include "espalier/base/error.h"

namespace espalier {

// The bytes by which the arena's stack advances: whole cache lines, which are as wide as the widest vectors.
constexpr std::int64_t arena_bytes(std::int64_t bytes) { return (bytes + 63) / 64 * 64; }

enum class Element : std::uint8_t {
  activation,
  accumulator,
  int32
};  // the run's dtype; its accumulator dtype; an index

struct ElementBytes {
  std::int64_t activation, accumulator;

  std::int64_t of(Element element) const {
    return element == Element::activation ? activation : element == Element::accumulator ? accumulator : 4;
  }
  bool operator==(const ElementBytes&) const = default;
};
inline ElementBytes element_bytes(DType dtype) { return {bytes_of(dtype), dtype == DType::float64 ? 8 : 4}; }

struct Buffer {
  static constexpr std::int64_t kVector = -1;  // as width: one number per row, in a tensor of one dimension

  std::string_view name;
  std::int64_t rows, width;
  Element element;
  int first, last;     // stages
  std::int64_t bytes;  // in the arena
};

class BufferList {
 public:
  static constexpr int kMostBuffers = 24, kMostStages = 8;
  // The index of a buffer in the list; -1: not declared.
  struct Place {
    int index = -1;
  };

  explicit BufferList(ElementBytes bytes) : element_bytes_(bytes) {}

  template <class Stage>
  Place add(std::string_view name, std::int64_t rows, std::int64_t width, Element element, Stage first, Stage last) {
    const std::int64_t numbers = width == Buffer::kVector ? rows : rows * width;
    const Buffer buffer{name,
                        rows,
                        width,
                        element,
                        static_cast<int>(first),
                        static_cast<int>(last),
                        arena_bytes(numbers * element_bytes_.of(element))};
    ESPALIER_INTERNAL(count_ < kMostBuffers, "buffer ", name);
    for (int stage = buffer.first; stage <= buffer.last; ++stage) held_[stage] += buffer.bytes;
    buffers_[static_cast<std::size_t>(count_)] = buffer;
    return {count_++};
  }
  // Adds a buffer held in one stage only.
  template <class Stage>
  Place add(std::string_view name, std::int64_t rows, std::int64_t width, Element element, Stage stage) {
    return add(name, rows, width, element, stage, stage);
  }
  // Adds a buffer to a block with one stage.
  Place add(std::string_view name, std::int64_t rows, std::int64_t width, Element element = Element::activation) {
    return add(name, rows, width, element, 0, 0);
  }
  // Declares the most bytes of blocks that run inside a stage.
  template <class Stage>
  void nest(Stage stage, std::int64_t bytes) {
    std::int64_t& most = nested_[static_cast<int>(stage)];
    most = std::max(most, bytes);
  }

  std::span<const Buffer> buffers() const { return {buffers_.data(), static_cast<std::size_t>(count_)}; }
  const Buffer& operator[](Place place) const { return buffers_[static_cast<std::size_t>(place.index)]; }

  std::int64_t held(int stage) const { return held_[stage]; }  // bytes of the block's own buffers
  // The peak over stages, with the blocks that run inside a stage.
  std::int64_t peak() const {
    std::int64_t most = 0;
    for (int stage = 0; stage < kMostStages; ++stage) most = std::max(most, held_[stage] + nested_[stage]);
    return most;
  }
  // Errors: InternalError unless each buffer ends no later than the buffers below it in the stack.
  void expect_stack() const;

 private:
  ElementBytes element_bytes_;
  int count_ = 0;
  std::array<Buffer, kMostBuffers> buffers_;
  std::int64_t held_[kMostStages] = {}, nested_[kMostStages] = {};
};

}  // namespace espalier
