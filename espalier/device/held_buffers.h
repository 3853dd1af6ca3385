// A block's declared buffers while it runs: taken from the arena and released again, stage by stage.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "espalier/device/arena.h"
#include "espalier/device/buffers.h"

namespace espalier {

class HeldBuffers {
 public:
  // No buffer is held before the first stage is entered. `declared` must outlive the object; `dtype` is the dtype of
  // activations. Errors: InternalError if a stack cannot hold the list's buffers.
  HeldBuffers(Arena& arena, const BufferList& declared, at::ScalarType dtype);
  ~HeldBuffers() { arena_.release_to(mark_); }
  HeldBuffers(const HeldBuffers&) = delete;
  HeldBuffers& operator=(const HeldBuffers&) = delete;

  // Releases buffers that ended before this stage and takes those that begin, uninitialised. Stages ascend; some may be
  // skipped.
  template <class Stage>
  void enter(Stage stage) {
    enter_stage(static_cast<int>(stage));
  }

  // [rows, width], or [rows] of Buffer::kVector; undefined if the buffer was not declared. Errors: InternalError if
  // this stage does not hold it.
  const at::Tensor& operator[](BufferList::Place place) const;

 private:
  void enter_stage(int stage);

  struct Held {
    at::Tensor tensor;
    std::int64_t mark = 0;  // of the arena before it was taken
  };

  Arena& arena_;
  const BufferList& declared_;
  at::ScalarType dtype_;
  std::int64_t mark_;
  std::array<Held, BufferList::kMostBuffers> held_;
};

}  // namespace espalier
