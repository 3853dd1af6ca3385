// A block's declared buffers while it runs: taken from the arena stage by stage, and given back.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "espalier/device/arena.h"
#include "espalier/device/buffers.h"

namespace espalier {

class HeldBuffers {
 public:
  // Nothing is held before the first stage is entered. `declared` must outlive the object; `dtype` is that of
  // activations. Errors: InternalError for a list that a stack cannot hold.
  HeldBuffers(Arena& arena, const BufferList& declared, at::ScalarType dtype);
  ~HeldBuffers() { arena_.release_to(mark_); }
  HeldBuffers(const HeldBuffers&) = delete;
  HeldBuffers& operator=(const HeldBuffers&) = delete;

  // Gives back what ended before the stage and takes what it holds, uninitialised. Stages ascend; one may be left out.
  template <class Stage>
  void enter(Stage stage) {
    enter_stage(static_cast<int>(stage));
  }

  // [rows, width]; undefined where the buffer was not declared.
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
