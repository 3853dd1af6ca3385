// Interface that stores the saved state of layers while nobody reads it (saved/). The decoder says when that is.
#pragma once

#include "espalier/device/arena.h"

namespace espalier {

class LayerKeeper {
 public:
  virtual ~LayerKeeper() = default;

  // Forward, layers ascending: `range` holds members that a layer saved; nobody reads it before bring_back.
  virtual void put_away(std::int64_t layer, Arena::Range range) = 0;
  // Backward, layers descending: the range holds again what it held.
  virtual void bring_back(std::int64_t layer) = 0;
  // After the layer's backward: nobody reads the range again.
  virtual void let_go(std::int64_t layer) = 0;
};

}  // namespace espalier
