// The memory of all activations: a stack of bytes in a single reserved range of addresses.
//
// A step's buffers are taken and released in last-in, first-out order (a trunk's state outlives the waves below it, a
// wave's layers are freed backwards), so a stack holds them without fragmentation, without an allocation in steady
// state, and with a high-water mark that is the step's true peak. Pages are touched on first use and reused afterwards.
// A range that is not needed for a while may sleep: its addresses stay valid, and its pages are returned for the
// buffers above it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "espalier/device/buffers.h"
#include "espalier/device/device.h"

namespace espalier {

class Arena {
 public:
  // Reserves addresses; memory is taken only as it is touched. At most `limit_bytes` are held at a time; the stack may
  // be up to `depth` times as deep while ranges of it sleep (less if the system cannot reserve so many addresses).
  explicit Arena(std::int64_t limit_bytes, Device& device = bound_device(), int depth = 1);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // An uninitialised contiguous tensor, valid until the stack is released below it. The stack grows by
  // arena_bytes(its bytes). Errors: MemoryBudgetError if that exceeds the limit or the reserved addresses.
  at::Tensor take(at::IntArrayRef sizes, at::ScalarType dtype);
  // A declared buffer, in a run whose activations have this dtype; undefined if it was not declared.
  at::Tensor take(const BufferList& declared, BufferList::Place place, at::ScalarType dtype);

  Device& device() const { return device_; }
  std::int64_t limit() const { return limit_; }

  std::int64_t in_use() const { return top_; }                 // the stack's depth, sleeping ranges included
  std::int64_t held() const { return top_ - asleep_; }         // without sleeping ranges
  std::int64_t high_water() const { return high_water_; }      // the most held since the reset
  std::int64_t touched() const { return touched_ - asleep_; }  // memory that the arena takes from the system
  void reset_high_water() { high_water_ = held(); }
  void release_to(std::int64_t mark);

  struct Range {
    std::int64_t begin, end;  // of the stack, as in_use() counts
    std::int64_t bytes() const { return end - begin; }
  };
  // Releases the pages of the range; its content is lost. The range may not be used until wake, after which it is
  // uninitialised, or until the stack is released below it. Sleeping ranges do not overlap.
  void sleep(Range range);
  // Errors: MemoryBudgetError if more than the limit is held then.
  void wake(Range range);
  // The stack without its sleeping ranges, ascending.
  std::vector<Range> awake() const;
  // Copy a range of the stack to and from host memory.
  void copy_out(Range range, std::byte* host) const { device_.copy_out(base_ + range.begin, range.bytes(), host); }
  void copy_in(const std::byte* host, Range range) { device_.copy_in(host, range.bytes(), base_ + range.begin); }
  // Returns the pages above the stack to the system.
  void trim();

 private:
  Device& device_;
  std::byte* base_ = nullptr;
  std::int64_t limit_ = 0, addresses_ = 0, top_ = 0, high_water_ = 0, touched_ = 0;
  std::vector<Range> sleeping_;
  std::int64_t asleep_ = 0;  // their bytes
};

// Releases the arena at the end of a block to its state at the beginning.
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
