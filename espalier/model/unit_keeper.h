// Interface that holds sharded parameters while nobody computes with them (--shard full, plan/units.h). Decoder and
// heads say when they do, and ranks that join without rows, all in the same order: these are collectives.
#pragma once

#include <cstdint>

namespace espalier {

class UnitKeeper {
 public:
  virtual ~UnitKeeper() = default;

  // The views of a unit's weights hold what all ranks have of it, until another unit takes its room; those of its
  // gradients hold 0.
  virtual void bring(std::int64_t unit) = 0;
  // For weights: starts to gather the unit, the next layer, while others compute.
  virtual void ask(std::int64_t) {}
  // For gradients: sums over the ranks what was added to the views since `bring`, and adds it to each rank's part, at
  // the end of the step at the latest.
  virtual void let_go(std::int64_t unit) = 0;
};

}  // namespace espalier
