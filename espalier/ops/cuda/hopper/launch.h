// Launches of kernels whose warpgroups hand on registers.
#pragma once

#include <tuple>

#include "espalier/ops/cuda/hopper/copies.h"
#include "espalier/ops/cuda/launch.h"

namespace espalier::cuda::hopper {

// Registers of a thread in a block of one warpgroup that copies and two that multiply: 65,536 for the block, in
// steps of eight. The first group gives most of its registers to the others.
inline constexpr int kLaunchRegisters = 65536 / (kGroupThreads * 3) / 8 * 8, kCopyingRegisters = 24,
                     kMultiplyingRegisters = 240;
static_assert(kCopyingRegisters + 2 * kMultiplyingRegisters <= kLaunchRegisters * 3);

inline constexpr std::int64_t kSharedBytes = 227 * 1024;  // of a block on sm_90

// True if the GPU holds this number of a kernel's blocks at a time.
bool holds_together(const void* kernel, int threads, std::int64_t shared_bytes, std::int64_t blocks);
// Errors: InternalError where it does not.
void start_together(const void* kernel, std::int64_t blocks_x, std::int64_t blocks_y, int threads,
                    std::int64_t shared_bytes, void** arguments);

// launch() of blocks with two multiplying warpgroups.
template <class... Parameters, class... Arguments>
void launch_warpgroups(void (*kernel)(Parameters...), Blocks blocks, std::int64_t shared_bytes,
                       const Arguments&... arguments) {
  constexpr int kThreads = 3 * kGroupThreads;
#ifdef __CUDACC__
  launch(kernel, blocks, kThreads, shared_bytes, arguments...);
#else
  if (blocks.x == 0 || blocks.y == 0) return;
  const emulation::WarpgroupLaunch shape{{{static_cast<unsigned>(blocks.x), static_cast<unsigned>(blocks.y)},
                                          {static_cast<unsigned>(kThreads)},
                                          static_cast<std::size_t>(shared_bytes)},
                                         kLaunchRegisters};
  emulation::give(shape, [=] { kernel(static_cast<Parameters>(arguments)...); });
#endif
}

// The same of blocks that wait for each other, which the GPU holds together (holds_together). It does not start them
// before there is room for all.
template <class... Parameters, class... Arguments>
void launch_together(void (*kernel)(Parameters...), Blocks blocks, std::int64_t shared_bytes,
                     const Arguments&... arguments) {
  constexpr int kThreads = 3 * kGroupThreads;
#ifdef __CUDACC__
  std::tuple<Parameters...> values(static_cast<Parameters>(arguments)...);
  std::apply(
      [&](auto&... each) {
        void* places[] = {&each...};
        start_together(reinterpret_cast<const void*>(kernel), blocks.x, blocks.y, kThreads, shared_bytes, places);
      },
      values);
#else
  const emulation::WarpgroupLaunch shape{{{static_cast<unsigned>(blocks.x), static_cast<unsigned>(blocks.y)},
                                          {static_cast<unsigned>(kThreads)},
                                          static_cast<std::size_t>(shared_bytes)},
                                         kLaunchRegisters,
                                         static_cast<unsigned>(blocks.x * blocks.y)};
  emulation::give(shape, [=] { kernel(static_cast<Parameters>(arguments)...); });
#endif
}

}  // namespace espalier::cuda::hopper
