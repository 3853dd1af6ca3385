// Memory common to the models of a process, and of each of them: the one place that knows the bytes beside a step.
//
// Learners, a reference and a sampler take turns, so one arena serves all of them. Each enters what it holds here as
// long as it exists; a plan is told what all the others hold.
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

  std::int64_t held_bytes() const;                         // by everybody
  std::int64_t held_beside(const Holder& holder) const;    // by everybody else
  std::int64_t held_beside(std::int64_t own_bytes) const;  // beside weights of so many bytes that a holder entered

  Arena arena;

  static constexpr int kArenaDepth = 64;  // what is offloaded keeps its addresses

 private:
  friend class Holder;
  std::vector<const Holder*> holders_;
};

// A number of bytes: weights that are only read, a sampler's keys and values.
class HeldBytes final : public Holder {
 public:
  HeldBytes(Workspace& workspace, std::int64_t bytes) : Holder(workspace), bytes_(bytes) {}
  std::int64_t held_bytes() const override { return bytes_; }

 private:
  std::int64_t bytes_;
};

}  // namespace espalier
