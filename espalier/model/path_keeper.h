// Interface for storing the path's tensors of layers not in use (saved/). The path decides which rows are valid.
//
// Shapes: P rows of the path's capacity, W numbers of a row of one kind (Mixer::path_kinds).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "espalier/device/arena.h"

namespace espalier {

class PathKeeper {
 public:
  // A tensor of the path for one layer: the rows of one kind, or their gradients, which forward-only passes lack.
  struct Member {
    std::int64_t layer = 0;
    std::size_t number = 0;  // among the layer's: all kinds, then the gradients of all
    std::size_t kinds = 0;
    const char* name = "";  // "keys"
    Arena::Range range = {};
    at::Tensor rows_PW = {};  // undefined if there is nothing to keep

    bool is_gradient() const { return number >= kinds; }
  };

  virtual ~PathKeeper() = default;

  // True if all layers share one buffer, which holds the layer in use.
  virtual bool one_place() const = 0;
  // Registers a member, which is not in use from now on; returns its number.
  virtual int add(const Member& member) = 0;
  // Requests a member ahead of bring_back. Requests are served in order, while the caller computes.
  virtual void ask(int member, std::int64_t rows) = 0;
  // Brings the member back: its first `rows` rows are as they were last put away, the others are undefined. It must be
  // the oldest request, or there are no requests.
  virtual void bring_back(int member, std::int64_t rows) = 0;
  // Puts the member away. Its rows [begin, end) have changed and are stored; for other rows the stored values stay.
  virtual void put_away(int member, std::int64_t begin, std::int64_t end) = 0;
};

}  // namespace espalier
