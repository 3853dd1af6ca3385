// Internal to the emulation of sm_90a: a block whose warpgroups multiply, copy and wait by themselves. The twins are in
// barriers.cpp, copies.cpp and products.cpp.
#pragma once

#include <array>
#include <deque>
#include <map>
#include <optional>
#include <string>

#include "tests/cuda/beside.h"
#include "tests/cuda/hopper/clocks.h"
#include "tests/cuda/hopper/twins.h"

namespace espalier::emulation {

// A barrier in shared memory that counts arrivals and bytes.
struct CountedBarrier {
  const void* at;
  int expected, pending;
  std::int64_t bytes = 0, phase = 0;  // phases that have ended
  Knowledge arriving, ended;
  unsigned actor;  // of its copies
  unsigned init_thread;
  std::uint32_t init_moment;
  bool known_to_copies = false;
};

struct NamedBarrier {
  int threads = 0, arrived = 0;
  std::int64_t round = 0;
  Knowledge arriving;
  std::map<std::int64_t, Knowledge> ended;  // by round
  Site site;
};

struct TileCopy {
  std::byte* to;
  TensorMap map;  // without data: bytes behind each other, from `from`
  const void* from;
  std::size_t bytes;
  CountedBarrier* barrier;
  int column, row;
  Site site;
};

// Sums in flight from shared to global memory.
struct Adding {
  float* to;
  const float* from;
  std::size_t bytes;
  unsigned thread;
  int group;
  std::vector<float> read;  // empty: still to be read
};

// Accumulators of a warp, from the first product in flight on them to the last.
struct Accumulators {
  std::array<float*, 32> d;
  int n = 0;
  std::vector<double> value;  // [32][n / 2]
  int in_flight = 0;
};
struct PendingProduct {
  Product what;
  float* key;                                 // the accumulators of lane 0
  std::array<std::array<unsigned, 4>, 32> a;  // the left factor in registers, as it was given
  std::array<const unsigned*, 32> a_at;
  std::vector<float> factor_a, factor_b;  // read early; else empty
  Site site;
};
struct ProductGroup {
  std::vector<PendingProduct> products;
  Site site;
};
struct WarpProducts {
  std::map<float*, Accumulators> in_flight;
  ProductGroup open;
  std::deque<ProductGroup> closed;
  std::size_t issued = 0;
};

struct ThreadState {
  Knowledge knows;
  bool fenced_products = false;                          // since the last group of products was closed
  std::map<const CountedBarrier*, std::int64_t> passed;  // the last phase that it waited for
  std::vector<const CountedBarrier*> inits;              // not yet made known to copies
  int sum_groups = 0;                                    // committed so far
};

class Warpgroups : public Beside {
 public:
  static constexpr unsigned kRegisterFile = 65536, kGroupThreads = 128, kMostBarriers = 64, kNamedBarriers = 16;

  Warpgroups(const Seat& seat, unsigned registers);

  bool move(std::mt19937& random) override;
  void at_block_barrier() override;
  void at_warp_barrier(unsigned warp) override;
  void access(const void* at, std::size_t bytes, bool writes, const void* code) override;
  void end() override;

  ThreadState& me() { return threads.at(thread_now()); }
  unsigned actor_of_thread(unsigned thread) const { return base + thread; }
  unsigned actor_of_products(unsigned warp) const { return base + seat.threads + warp; }
  unsigned actor_now() const { return actor_of_thread(thread_now()); }
  bool is_thread(unsigned actor) const { return actor != kNobody && actor % actors < seat.threads; }
  bool fenced(const Knowledge& knows, unsigned actor, std::uint32_t moment) const {
    return !is_thread(actor) || knows.fenced[actor] >= moment;
  }
  std::string name_of_actor(unsigned actor) const;
  std::string name_of_place(const void* at) const;
  // Adds what the running thread knows to `others`; its later accesses are of a new moment.
  void tell(Knowledge& others);
  // A thread or product that read the place, and which `knows` does not cover; empty: none.
  std::string unknown_reader(const Knowledge& knows, const Place& place) const;
  // Calls each(Place&) for the places of a range of shared memory; false if the range leaves it.
  template <class Each>
  [[nodiscard]] bool for_places(const void* begin, std::size_t bytes, Each each) {
    const std::ptrdiff_t at = static_cast<const std::byte*>(begin) - seat.shared;
    if (at < 0 || static_cast<std::size_t>(at) + bytes > seat.shared_bytes) return false;
    for (std::size_t i = 0; i < bytes; i += 4) each(places[(static_cast<std::size_t>(at) + i) / 4]);
    return true;
  }
  // A thread's access, checked and noted.
  std::optional<std::string> problem_of_access(unsigned thread, const void* at, std::size_t bytes, bool writes);
  CountedBarrier& counted_at(void* at, Site site);
  void finish_copy(std::size_t index);
  void finish_adding(std::size_t index);
  std::string finish_product(unsigned warp, PendingProduct& product);
  void read_factors(unsigned warp_of_group, PendingProduct& product) const;
  // Calls each(Place&) for what a warp's product reads of its factors in shared memory; false if that leaves it.
  template <class Each>
  [[nodiscard]] bool for_factor_places(const Product& product, unsigned warp_of_group, Each each);

  Seat seat;
  unsigned base, actors;  // its first actor among all blocks' actors, and the number of them
  std::vector<ThreadState> threads;
  std::vector<Place> places;
  std::vector<WarpProducts> products;
  std::vector<std::vector<Product>> group_products;  // of each warpgroup, the products of its warps, in order
  std::vector<unsigned> warp_registers;
  unsigned free_registers;
  std::map<void*, CountedBarrier> counted;
  std::array<NamedBarrier, kNamedBarriers> named;
  std::vector<TileCopy> copies;
  std::vector<Adding> adding;
};

// The warpgroups of the running thread's block.
Warpgroups& warpgroups_now();

// An offset in shared memory with the 16-byte pieces of each 1,024 bytes swizzled.
inline std::uintptr_t swizzled(std::uintptr_t offset) { return offset ^ ((offset >> 7 & 7) << 4); }
void end_phase_if_complete(CountedBarrier& barrier);
// Launches come one after another: what passed between blocks of those before is known.
void forget_turns();

}  // namespace espalier::emulation
