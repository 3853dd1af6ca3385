// CUDA's execution model on a processor: every thread of a block is a fiber, blocks run one after another, in orders
// that a seed decides. The kernels of espalier/ops/cuda are compiled by a C++ compiler with this header before them.
//
// A kernel may use: threadIdx, blockIdx, blockDim, gridDim, ESPALIER_SHARED, dynamic_shared, __syncthreads,
// __syncwarp, the shuffles and votes below, and the functions of ptx.h. Found in every run, with file and line:
//   barriers that not all threads reach, or reach at different places
//   warp operations whose lanes name other operations or masks, or are missing; values of lanes outside the mask
//   shared memory past its end (an object of its own for each block) or read before it was written (it starts as NaN)
//   a copy in flight that is read early (its target is NaN until the wait) or that nobody waits for
//   vector accesses at addresses that a GPU refuses; launches that a GPU refuses
//   races, and accesses outside of arrays (accesses.h)
// Orders: seed 0 forward; even seeds random; odd seeds let one warp run ahead as far as it can, which is what shows a
// missing barrier before memory is used again.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <source_location>
#include <stdexcept>
#include <string>
#include <type_traits>

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace espalier::emulation {

#ifdef __cpp_lib_source_location
using Site = std::source_location;
#else  // Clang 14
class Site {
 public:
  static constexpr Site current(const char* file = __builtin_FILE(), unsigned line = __builtin_LINE()) {
    Site site;
    site.file_ = file, site.line_ = line;
    return site;
  }
  constexpr const char* file_name() const { return file_; }
  constexpr unsigned line() const { return line_; }

 private:
  const char* file_ = "";
  unsigned line_ = 0;
};
#endif

// An action that a GPU would do wrongly or not at all. Thrown out of the launch.
class Fault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The order of blocks and threads in the launches that follow.
void set_seed(unsigned seed);
// Counts since they were reset: "switches", "mma", "ldmatrix", "bank conflicts", "launches".
std::int64_t counter(const std::string& name);
void reset_counters();

// A GPU by the shared memory that one of its blocks may ask for.
struct Architecture {
  const char* name;
  std::size_t shared_bytes;
};
// CUDA C++ Programming Guide 13.0, "Technical Specifications per Compute Capability".
inline constexpr Architecture kArchitectures[] = {{"sm_80", 163 << 10}, {"sm_86", 99 << 10},   {"sm_89", 99 << 10},
                                                  {"sm_90", 227 << 10}, {"sm_100", 227 << 10}, {"sm_120", 99 << 10}};
// The architecture that later launches are held to; at first sm_80.
void set_architecture(const Architecture& architecture);
const Architecture& architecture();

struct Launch {
  dim3 grid, block;
  std::size_t shared_bytes = 0;
};
// Runs `body` once for each thread. Errors: Fault, after which the other threads do not go on.
void run(const Launch& launch, const std::function<void()>& body);
// The same when its turn comes, where a stream takes launches (take_launches), else now.
void give(const Launch& launch, std::function<void()> body);
void take_launches(std::function<void(std::function<void()>)> stream);

// ---- what stands behind a kernel's words, called by its threads ----

struct ThreadView {
  dim3 thread, block, block_dim, grid_dim;
  unsigned lane;
};
const ThreadView& self();

[[noreturn]] void fail(const std::string& what, Site site);
void barrier(Site site);

inline constexpr int kLaneWords = 20;  // of 8 bytes: the most that a lane brings to a warp operation
struct Exchange {                      // what the lanes of one warp operation brought
  unsigned mask = 0;
  std::uint64_t words[32][kLaneWords];
};
// Returns when all lanes of the mask have called the same operation with the same mask. The result stays until this
// lane's next call.
const Exchange& exchange(const char* operation, unsigned mask, const void* value, std::size_t bytes, Site site);
template <class Value>
const Exchange& gather(const char* operation, unsigned mask, const Value& value, Site site) {
  static_assert(sizeof(Value) <= sizeof(std::uint64_t) * kLaneWords && std::is_trivially_copyable_v<Value>);
  return exchange(operation, mask, &value, sizeof(Value), site);
}
template <class Value>
Value lane_value(const Exchange& all, unsigned lane, Site site) {
  if (lane >= 32 || (all.mask >> lane & 1) == 0) fail("a lane outside the mask is read", site);
  Value value;
  std::memcpy(&value, all.words[lane], sizeof(Value));
  return value;
}

// One object for a place in the source, new and full of NaN in each block.
void* shared_object(std::size_t bytes, Site site);
void* dynamic_shared_bytes();
void count(const char* name, std::int64_t amount);

// cp.async: from now on the target holds NaN, and what the copy brings once its group was waited for.
void begin_copy(void* to, const void* from, int written, int bytes, Site site);  // those past `bytes` are zeros
void commit_copies();
void wait_for_copies(int groups_left);

inline void expect_aligned(const void* at, std::size_t bytes, Site site) {
  if (reinterpret_cast<std::uintptr_t>(at) % bytes != 0)
    fail("an access of " + std::to_string(bytes) + " bytes at an address that is no multiple of that", site);
}

}  // namespace espalier::emulation

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define threadIdx (::espalier::emulation::self().thread)
#define blockIdx (::espalier::emulation::self().block)
#define blockDim (::espalier::emulation::self().block_dim)
#define gridDim (::espalier::emulation::self().grid_dim)

#define ESPALIER_SITE ::espalier::emulation::Site site = ::espalier::emulation::Site::current()

inline void __syncthreads(ESPALIER_SITE) { espalier::emulation::barrier(site); }
inline void __syncwarp(unsigned mask = ~0u, ESPALIER_SITE) { espalier::emulation::gather("syncwarp", mask, 0, site); }

// `width` lanes form a group; a value from outside the group is the lane's own.
template <class Value>
Value __shfl_sync(unsigned mask, Value value, int from, int width = 32, ESPALIER_SITE) {
  namespace e = espalier::emulation;
  const unsigned group = e::self().lane & ~(static_cast<unsigned>(width) - 1);
  const auto& all = e::gather("shfl", mask, value, site);
  return e::lane_value<Value>(all, group + static_cast<unsigned>(from) % static_cast<unsigned>(width), site);
}
template <class Value>
Value __shfl_xor_sync(unsigned mask, Value value, int bits, int width = 32, ESPALIER_SITE) {
  namespace e = espalier::emulation;
  const unsigned lane = e::self().lane, from = lane ^ static_cast<unsigned>(bits);
  const auto& all = e::gather("shfl_xor", mask, value, site);
  return from >= (lane & ~(static_cast<unsigned>(width) - 1)) + static_cast<unsigned>(width)
             ? value
             : e::lane_value<Value>(all, from, site);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, ESPALIER_SITE) {
  namespace e = espalier::emulation;
  const auto& all = e::gather("ballot", mask, predicate != 0 ? 1u : 0u, site);
  unsigned bits = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    if ((mask >> lane & 1) != 0) bits |= e::lane_value<unsigned>(all, lane, site) << lane;
  return bits;
}
inline int min(int a, int b) { return b < a ? b : a; }
inline int max(int a, int b) { return a < b ? b : a; }
inline int __popc(unsigned bits) { return std::popcount(bits); }
