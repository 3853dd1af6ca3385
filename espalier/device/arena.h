// The one place activations live: a stack of bytes in a single reserved range of addresses.
//
// A step's buffers are born and die in last-in, first-out order (a trunk's state outlives the waves below it, a wave's
// layers are freed backwards), so a stack holds them without fragmentation, without an allocation in steady state, and
// with a high-water mark that is the step's true peak. Pages are touched on first use and reused afterwards.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

#include "espalier/device/buffers.h"
#include "espalier/device/device.h"

namespace espalier {

class Arena {
 public:
  // Reserves addresses for `limit_bytes`; memory is taken only as it is touched.
  explicit Arena(std::int64_t limit_bytes, Device& device = bound_device());
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // An uninitialised contiguous tensor, valid until the stack is released below it. The stack grows by
  // arena_bytes(its bytes). Errors: MemoryBudgetError when the limit is passed.
  at::Tensor take(at::IntArrayRef sizes, at::ScalarType dtype);
  // A declared buffer, in a run whose activations have this dtype; undefined where it was not declared.
  at::Tensor take(const BufferList& declared, BufferList::Place place, at::ScalarType dtype);

  Device& device() const { return device_; }

  std::int64_t in_use() const { return top_; }
  std::int64_t high_water() const { return high_water_; }
  std::int64_t touched() const { return touched_; }  // highest ever: what the arena holds of the machine's memory
  void reset_high_water() { high_water_ = top_; }
  void release_to(std::int64_t mark);

 private:
  Device& device_;
  std::byte* base_ = nullptr;
  std::int64_t limit_ = 0, top_ = 0, high_water_ = 0, touched_ = 0;
};

// Releases at the end of a block what was taken in it.
class ArenaScope {
 public:
  explicit ArenaScope(Arena& arena) : arena_(arena), mark_(arena.in_use()) {}
  ~ArenaScope() { arena_.release_to(mark_); }
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;

 private:
  Arena& arena_;
  std::int64_t mark_;
};

}  // namespace espalier
