// Who has the parameters that ranks divide while nobody computes with them (--shard full, plan/units.h). Decoder and
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
  // Of gradients: what was added to the views since `bring` is summed over the ranks and added to what each keeps.
  virtual void let_go(std::int64_t unit) = 0;
};

}  // namespace espalier
