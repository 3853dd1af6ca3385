// One function for each PTX instruction that kernels use, and its twin for the emulation.
//
// Layouts of fragments: PTX ISA, "Matrix Fragments for mma.m16n8k16" and "ldmatrix". With g = lane / 4, t = lane % 4:
//   a (16 x 16, rows): {g, 2t..} {g + 8, 2t..} {g, 2t + 8..} {g + 8, 2t + 8..}, two columns a register
//   b (16 x 8, columns): {2t.., g} {2t + 8.., g}, two rows a register
//   d (16 x 8): {g, 2t} {g, 2t + 1} {g + 8, 2t} {g + 8, 2t + 1}
#pragma once

#include "espalier/ops/cuda/kernel.h"

namespace espalier::cuda {

#ifdef __CUDACC__
#define ESPALIER_TWIN_SITE
#else
#define ESPALIER_TWIN_SITE , emulation::Site site = emulation::Site::current()
#endif

// The two bfloat16 of a register, the first one in the low half. One instruction for two: one for each has a sixteenth
// of the rate of a product.
__device__ __forceinline__ unsigned packed(float low, float high) {
#ifdef __CUDACC__
  unsigned both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
#else
  return narrowed<bfloat16>(low).bits | static_cast<unsigned>(narrowed<bfloat16>(high).bits) << 16;
#endif
}

// One of the two.
__device__ __forceinline__ float unpacked(unsigned both, bool high) {
  bfloat16 one;
  one.bits = static_cast<std::uint16_t>(high ? both >> 16 : both & 0xffffu);
  return widened(one);
}

__device__ __forceinline__ float exp2_approximate(float x) {
#ifdef __CUDACC__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::exp2(x);
#endif
}

// d += a b, of bfloat16 in float.
__device__ __forceinline__ void mma_16816(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                          unsigned b1 ESPALIER_TWIN_SITE) {
#ifdef __CUDACC__
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  struct Fragments {
    unsigned a[4], b[2];
  };
  const Fragments mine{{a[0], a[1], a[2], a[3]}, {b0, b1}};
  const emulation::Exchange& all = emulation::gather("mma.m16n8k16", kWholeWarp, mine, site);
  const auto half = [](unsigned two, unsigned i) {
    bfloat16 x;
    x.bits = static_cast<std::uint16_t>(i != 0 ? two >> 16 : two);
    return widened(x);
  };
  const unsigned lane = emulation::self().lane, g = lane / 4, t = lane % 4;
  float row[2][16], column[2][16];
  for (unsigned part = 0; part < 4; ++part) {
    const auto of_row = emulation::lane_value<Fragments>(all, g * 4 + part, site);
    for (unsigned c = 0; c < 2; ++c) {
      const auto of_column = emulation::lane_value<Fragments>(all, (2 * t + c) * 4 + part, site);
      for (unsigned k = 0; k < 4; ++k) {  // columns 2 part, 2 part + 1, and those 8 further
        const unsigned at = 2 * part + k % 2 + k / 2 * 8;
        row[c][at] = half(of_row.a[c + k / 2 * 2], k % 2);
        column[c][at] = half(of_column.b[k / 2], k % 2);
      }
    }
  }
  for (int r = 0; r < 2; ++r)
    for (int c = 0; c < 2; ++c) {
      double sum = static_cast<double>(d[r * 2 + c]);
      for (int k = 0; k < 16; ++k) sum += static_cast<double>(row[r][k]) * static_cast<double>(column[c][k]);
      d[r * 2 + c] = static_cast<float>(sum);
    }
  if (lane == 0) emulation::count("mma", 1);
#endif
}

// A place in shared memory: on a GPU an address of 32 bits. Places are counted in bytes.
#ifdef __CUDACC__
using SharedPlace = unsigned;
__device__ __forceinline__ SharedPlace place_of(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}
#else
using SharedPlace = unsigned char*;
inline SharedPlace place_of(void* shared) { return static_cast<unsigned char*>(shared); }
#endif

// Loads four 8 x 8 matrices of 16-bit elements from shared memory: lane l gives the address of row l % 8 of matrix l /
// 8, and receives row l / 4, columns 2 (l % 4) and the next, of each matrix, or of its transpose if `transposed`.
template <bool transposed>
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], SharedPlace row ESPALIER_TWIN_SITE) {
#ifdef __CUDACC__
  if constexpr (transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
#else
  emulation::expect_aligned(row, 16, site);
  struct Row {
    std::uint16_t x[8];
    std::uintptr_t at;
  } mine;
  std::memcpy(mine.x, row, sizeof(mine.x));
  mine.at = reinterpret_cast<std::uintptr_t>(row);
  const emulation::Exchange& all =
      emulation::gather(transposed ? "ldmatrix.trans" : "ldmatrix", kWholeWarp, mine, site);
  const unsigned lane = emulation::self().lane;
  for (unsigned m = 0; m < 4; ++m) {
    unsigned two[2];
    for (unsigned i = 0; i < 2; ++i) {
      const unsigned a = lane / 4, b = 2 * (lane % 4) + i;
      two[i] = emulation::lane_value<Row>(all, m * 8 + (transposed ? b : a), site).x[transposed ? a : b];
    }
    r[m] = two[0] | two[1] << 16;
  }
  if (lane == 0)
    for (unsigned m = 0; m < 4; ++m) {  // eight rows meet in a pass: each is to have its own four banks
      unsigned banks = 0;
      for (unsigned i = 0; i < 8; ++i) banks |= 1u << emulation::lane_value<Row>(all, m * 8 + i, site).at / 16 % 8;
      emulation::count("bank conflicts", 8 - std::popcount(banks));
      emulation::count("ldmatrix", 1);
    }
#endif
}

// Copies 4 or 16 bytes from global to shared memory, in flight until its group is waited for; zeros if not `inside`,
// and then nothing is read.
template <int bytes>
__device__ __forceinline__ void cp_async(SharedPlace shared, const void* global, bool inside ESPALIER_TWIN_SITE) {
  static_assert(bytes == 4 || bytes == 16);
#ifdef __CUDACC__
  const int read = inside ? bytes : 0;
  if constexpr (bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(read) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(read) : "memory");
#else
  emulation::begin_copy(shared, global, bytes, inside ? bytes : 0, site);
#endif
}
__device__ __forceinline__ void cp_async_commit() {
#ifdef __CUDACC__
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  emulation::commit_copies();
#endif
}
// Waits until at most `left` groups of this thread are in flight.
template <int left>
__device__ __forceinline__ void cp_async_wait() {
#ifdef __CUDACC__
  asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
#else
  emulation::wait_for_copies(left);
#endif
}

}  // namespace espalier::cuda
