// Who keeps what a path holds of layers that are not in use (saved/). The path says which bytes of it count.
#pragma once

#include <cstdint>

#include "espalier/device/arena.h"

namespace espalier {

class PathKeeper {
 public:
  virtual ~PathKeeper() = default;

  // One more range of the arena, which sleeps from now on; returns its number.
  virtual int add(Arena::Range range) = 0;
  // The next to be brought back, after those asked for before: read ahead while others compute.
  virtual void ask(int member, std::int64_t bytes) = 0;
  // The member is in memory again, its first `bytes` are those that were put away last; the others are undefined. It
  // is the first of those asked for, or none is.
  virtual void bring_back(int member, std::int64_t bytes) = 0;
  // The member sleeps. Its bytes [begin, end) have changed and are kept; of the others what was kept before.
  virtual void put_away(int member, std::int64_t begin, std::int64_t end) = 0;
};

}  // namespace espalier
