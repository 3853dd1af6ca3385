#include "espalier/device/held_buffers.h"

#include <algorithm>

#include "espalier/base/error.h"

namespace espalier {

HeldBuffers::HeldBuffers(Arena& arena, const BufferList& declared, at::ScalarType dtype)
    : arena_(arena), declared_(declared), dtype_(dtype), mark_(arena.in_use()) {
  declared.expect_stack();
}

void HeldBuffers::enter_stage(int stage) {
  const auto buffers = declared_.buffers();
  std::int64_t top = arena_.in_use();
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    if (buffers[i].last >= stage || !held_[i].tensor.defined()) continue;
    top = std::min(top, held_[i].mark);
    held_[i].tensor = at::Tensor();
  }
  arena_.release_to(top);
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    const Buffer& buffer = buffers[i];
    if (stage < buffer.first || stage > buffer.last || held_[i].tensor.defined()) continue;
    held_[i].mark = arena_.in_use();
    held_[i].tensor = arena_.take(declared_, {static_cast<int>(i)}, dtype_);
  }
}

const at::Tensor& HeldBuffers::operator[](BufferList::Place place) const {
  static const at::Tensor nowhere;
  if (place.index < 0) return nowhere;
  const at::Tensor& tensor = held_.at(static_cast<std::size_t>(place.index)).tensor;
  ESPALIER_INTERNAL(tensor.defined(), declared_[place].name, " is not held in this stage");
  return tensor;
}

}  // namespace espalier
