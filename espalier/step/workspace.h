// The memory of a process's models, shared and separate. Only this object knows the bytes held beside a step.
//
// Learners, a reference and a sampler take turns, so they share one arena. Each registers its held bytes here while it
// exists; a plan counts the bytes of all the others.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/device/arena.h"

namespace espalier {

class Workspace;

// Something that holds memory outside the arena.
class Holder {
 public:
  explicit Holder(Workspace& workspace);
  virtual ~Holder();
  Holder(const Holder&) = delete;
  Holder& operator=(const Holder&) = delete;

  virtual std::int64_t held_bytes() const = 0;

 private:
  Workspace& workspace_;
};

class Workspace {
 public:
  explicit Workspace(std::int64_t arena_limit) : arena(arena_limit, bound_device(), kArenaDepth) {}

  std::int64_t held_bytes() const;                         // of all holders
  std::int64_t held_beside(const Holder& holder) const;    // of all other holders
  std::int64_t held_beside(std::int64_t own_bytes) const;  // beside weights of this size, registered by a holder

  Arena arena;

  static constexpr int kArenaDepth = 64;  // offloaded ranges keep their addresses

 private:
  friend class Holder;
  std::vector<const Holder*> holders_;
};

// A plain number of bytes: read-only weights, a sampler's keys and values.
class HeldBytes final : public Holder {
 public:
  HeldBytes(Workspace& workspace, std::int64_t bytes) : Holder(workspace), bytes_(bytes) {}
  std::int64_t held_bytes() const override { return bytes_; }

 private:
  std::int64_t bytes_;
};

}  // namespace espalier
