// Clocks of everything in a block that reads or writes shared memory, and the last accesses to each place of it.
//
// The actors of a block are its threads, the products of each warp, and the copies of each barrier that counts. An
// access is ordered behind another one if its actor knows the other's moment. Knowledge passes with barriers of any
// kind, with copies that end a barrier's phase, and with waits for products. Barriers of a whole block, which
// accesses.cpp counts, do not suffice where some threads run ahead of others by design.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace espalier::emulation {

// For each actor the moment up to which its work is known, and for threads the moment up to which their writes have
// passed a fence for copies and products.
struct Knowledge {
  std::vector<std::uint32_t> until, fenced;

  void join(const Knowledge& other) {
    if (until.size() < other.until.size()) until.resize(other.until.size()), fenced.resize(other.until.size());
    for (std::size_t i = 0; i < other.until.size(); ++i) {
      until[i] = std::max(until[i], other.until[i]);
      fenced[i] = std::max(fenced[i], other.fenced[i]);
    }
  }
  bool knows(unsigned actor, std::uint32_t moment) const { return until[actor] >= moment; }
};

inline constexpr unsigned kMostWarps = 16, kNobody = ~0u;

// Four bytes of shared memory.
struct Place {
  std::uint32_t writer = kNobody, written = 0;
  std::uint16_t arriving = 0;  // copies in flight to here
  std::uint16_t in_use = 0;    // products and sums in flight that read it
  bool of_barrier = false;     // of one that counts: nothing else is here
  struct Reads {
    std::uint32_t moment = 0, lanes = 0;
  } read[kMostWarps];                           // by lanes of each warp, at the last moment
  std::uint32_t product_read[kMostWarps] = {};  // by products of each warp, the moment of their wait

  void forget_reads() {
    for (Reads& reads : read) reads = {};
    for (std::uint32_t& moment : product_read) moment = 0;
  }
};

}  // namespace espalier::emulation
