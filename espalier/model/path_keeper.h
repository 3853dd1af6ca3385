// Interface that stores the path's tensors of layers that are not in use (saved/). The path says which rows count.
//
// Shapes: P rows that a path has room for, W elements of a row's keys, or values.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "espalier/device/arena.h"

namespace espalier {

class PathKeeper {
 public:
  enum class Kind { keys, values, grad_keys, grad_values };
  static constexpr int kKinds = 4;

  // Tensors of the path for one layer; forward-only passes have no gradients.
  struct Member {
    Kind kind = Kind::keys;
    std::int64_t layer = 0;
    Arena::Range range = {};
    at::Tensor rows_PW = {};  // undefined where it is nothing

    bool is_gradient() const { return kind == Kind::grad_keys || kind == Kind::grad_values; }
  };

  virtual ~PathKeeper() = default;

  // Whether all layers lie in one place, where those of the layer in use are.
  virtual bool one_place() const = 0;
  // One more member, which is not in use from now on; returns its number.
  virtual int add(const Member& member) = 0;
  // The next to be brought back, after those asked for before: it comes while others compute.
  virtual void ask(int member, std::int64_t rows) = 0;
  // The member is in its place again, its first `rows` rows are those that were put away last; the others are
  // undefined. It is the first of those asked for, or none is.
  virtual void bring_back(int member, std::int64_t rows) = 0;
  // The member is not in use. Its rows [begin, end) have changed and are kept; of the others what was kept before.
  virtual void put_away(int member, std::int64_t begin, std::int64_t end) = 0;
};

}  // namespace espalier
