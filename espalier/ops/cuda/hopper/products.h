// Products of a warpgroup (wgmma.mma_async): d [64, N] += a [64, 16] b [16, N], of bfloat16 in float. They run beside
// the threads, which wait for groups of them. One function for each instruction, with its twin for the emulation.
//
// Thread t of the group has rows 16 (t / 32) + t % 32 / 4 and 8 further of d, columns 8 j + 2 (t % 4) and the next, at
// d[4 j + 2 r + c]. A left factor in registers has the layout of mma.m16n8k16, for the 16 rows of each warp.
#pragma once

#include "espalier/ops/cuda/hopper/copies.h"
#ifdef __CUDACC__
#include "espalier/ops/cuda/hopper/wgmma_shapes.h"
#endif

namespace espalier::cuda::hopper {

// The name of a factor in shared memory. Bits 0..13 are its address; bits 16..29 the distance of its parts, which
// counts where columns come first; bits 32..45 the distance of groups of eight rows; all in 16 bytes. Bit 62: swizzle
// of 128 bytes.
__device__ __forceinline__ std::uint64_t factor_at(SharedPlace place, int part_bytes) {
#ifdef __CUDACC__
  const std::uint64_t address = place;
#else
  const std::uint64_t address = emulation::shared_address(place);
#endif
  return (address >> 4 & 0x3fff) | static_cast<std::uint64_t>(part_bytes >> 4) << 16 |
         static_cast<std::uint64_t>(8 * kPartRowBytes >> 4) << 32 | std::uint64_t{1} << 62;
}
// The factor some bytes further.
__device__ __forceinline__ std::uint64_t further(std::uint64_t factor, int bytes) { return factor + (bytes >> 4); }
// 16 n columns further in a tile of kRows rows that is read rows first.
template <int kRows>
__device__ __forceinline__ std::uint64_t columns_further(std::uint64_t factor, int n) {
  return further(factor, n / 4 * kPartBytes<kRows> + n % 4 * 32);
}
// 16 n rows further in a tile that is read columns first.
__device__ __forceinline__ std::uint64_t rows_further(std::uint64_t factor, int n) {
  return further(factor, n * 16 * kPartRowBytes);
}

// Orders this thread's earlier uses of registers before the products that follow.
__device__ __forceinline__ void wgmma_fence(ESPALIER_ONLY_SITE) {
#ifdef __CUDACC__
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#else
  emulation::product_fence(site);
#endif
}
// Closes a group of products.
__device__ __forceinline__ void wgmma_commit(ESPALIER_ONLY_SITE) {
#ifdef __CUDACC__
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#else
  emulation::commit_products(site);
#endif
}
// Waits until at most `left` groups are in flight.
template <int left>
__device__ __forceinline__ void wgmma_wait(ESPALIER_ONLY_SITE) {
#ifdef __CUDACC__
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
#else
  emulation::wait_for_products(left, site);
#endif
}
// Keeps the compiler from moving reads of results above the wait before this line.
template <int n>
__device__ __forceinline__ void keep(float (&d)[n]) {
#ifdef __CUDACC__
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(d[i])::"memory");
#else
  (void)d;
#endif
}

// d = a b, or d += a b if `adds`. `columns_first`: b is [16, N] in rows of a tile, else [N, 16].
template <int N, bool columns_first>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], std::uint64_t a, std::uint64_t b,
                                      bool adds ESPALIER_TWIN_SITE) {
#ifdef __CUDACC__
  wgmma_shared<N, columns_first ? 1 : 0>(d, a, b, adds ? 1 : 0);
#else
  emulation::product({.n = N, .columns_first = columns_first, .adds = adds, .in_registers = false, .a = a, .b = b}, d,
                     nullptr, site);
#endif
}
template <int N, bool columns_first>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], const unsigned (&a)[4], std::uint64_t b,
                                      bool adds ESPALIER_TWIN_SITE) {
#ifdef __CUDACC__
  wgmma_registers<N, columns_first ? 1 : 0>(d, a, b, adds ? 1 : 0);
#else
  emulation::product({.n = N, .columns_first = columns_first, .adds = adds, .in_registers = true, .a = 0, .b = b}, d, a,
                     site);
#endif
}

// d [64, N] = x y^T over D columns, x of a tile of kX rows from `x` on, y [N, D] a tile of kY rows; closes a group.
template <int D, int N, int kX, int kY>
__device__ __forceinline__ void multiply_rows(float (&d)[N / 2], std::uint64_t x, std::uint64_t y) {
#pragma unroll
  for (int k = 0; k < D / 16; ++k) wgmma<N, false>(d, columns_further<kX>(x, k), columns_further<kY>(y, k), k > 0);
  wgmma_commit();
}
// d [64, N] += x y, x [64, K] in registers, y [K, N] of a tile that is read columns first; d = x y unless `adds`.
// Closes a group.
template <int N, int K>
__device__ __forceinline__ void multiply_columns(float (&d)[N / 2], const unsigned (&x)[K / 16][4], std::uint64_t y,
                                                 bool adds) {
#pragma unroll
  for (int k = 0; k < K / 16; ++k) wgmma<N, true>(d, x[k], rows_further(y, k), adds || k > 0);
  wgmma_commit();
}
// Results [64, K] as the left factor of a product, rounded to bfloat16.
template <int K>
__device__ __forceinline__ void round_factor(const float (&x)[K / 2], unsigned (&a)[K / 16][4]) {
#pragma unroll
  for (int k = 0; k < K / 16; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) a[k][i] = packed(x[8 * k + 2 * i], x[8 * k + 2 * i + 1]);
}

}  // namespace espalier::cuda::hopper
