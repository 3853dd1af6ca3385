// Tensors of a declared list that outlive the block which declares them: from a forward to its backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "espalier/device/arena.h"
#include "espalier/device/buffers.h"

namespace espalier {

class SavedBuffers {
 public:
  SavedBuffers() = default;
  // Takes all buffers of the list from the arena, where the caller releases them.
  SavedBuffers(Arena& arena, const BufferList& declared, at::ScalarType dtype) {
    const int count = static_cast<int>(declared.buffers().size());
    for (int i = 0; i < count; ++i) tensors_.push_back(arena.take(declared, {i}, dtype));
  }

  // Undefined where the list does not declare it, or was not taken.
  at::Tensor operator[](BufferList::Place place) const {
    const auto at = static_cast<std::size_t>(place.index);
    return place.index < 0 || at >= tensors_.size() ? at::Tensor() : tensors_[at];
  }

 private:
  std::vector<at::Tensor> tensors_;
};

}  // namespace espalier
