// Copies by the copy engine of sm_90a (TMA): tiles of a matrix, and ranges of bytes. One function for each instruction,
// with its twin for the emulation.
//
// A tile [R, D] of bfloat16 in shared memory consists of parts of 64 columns, one behind the other. A row of a part has
// 128 bytes, and its 16-byte pieces are permuted by the row (swizzle of 128 bytes): piece p of row r is at r * 128 +
// (p ^ r % 8) * 16. Copies write this layout, and products read it, rows first or columns first.
#pragma once

#include "espalier/ops/cuda/hopper/barriers.h"
#include "espalier/ops/cuda/hopper/tensor_map.h"

namespace espalier::cuda::hopper {

#ifdef __CUDACC__
#define ESPALIER_GRID_CONSTANT __grid_constant__
#else
#define ESPALIER_GRID_CONSTANT
#endif

template <int kRows>
inline constexpr int kPartBytes = kRows* kPartRowBytes;

// Columns of a tile in shared memory for rows of D elements: whole parts. The columns behind D belong to the next head
// or are zeros; their results are not stored.
template <int D>
inline constexpr int kParts = (D + kPartColumns - 1) / kPartColumns;

// Dynamic shared memory, at a multiple of 1,024 as tiles need it.
#ifdef __CUDACC__
__device__ __forceinline__ unsigned char* shared_bytes() {
  extern __shared__ __align__(1024) unsigned char espalier_shared_tiles[];
  return espalier_shared_tiles;
}
#else
inline unsigned char* shared_bytes() { return static_cast<unsigned char*>(emulation::dynamic_shared_bytes()); }
#endif

// Copies a box of a matrix from (column, row) on; its bytes count at the barrier.
__device__ __forceinline__ void tensor_load(SharedPlace to, const TensorMap& map, SharedPlace barrier, int column,
                                            int row ESPALIER_TWIN_SITE) {
#ifdef __CUDACC__
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
          "r"(to),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(barrier), "r"(column), "r"(row)
      : "memory");
#else
  emulation::tensor_load(to, map, barrier, column, row, site);
#endif
}

// Copies the parts of rows [row, row + kRows) of a matrix, from a column on.
template <int D, int kRows>
__device__ __forceinline__ void load_tile(SharedPlace to, const TensorMap& map, SharedPlace barrier, int column,
                                          int row ESPALIER_TWIN_SITE) {
#pragma unroll
  for (int part = 0; part < kParts<D>; ++part)
#ifdef __CUDACC__
    tensor_load(to + part * kPartBytes<kRows>, map, barrier, column + part * kPartColumns, row);
#else
    tensor_load(to + part * kPartBytes<kRows>, map, barrier, column + part * kPartColumns, row, site);
#endif
}

// Copies bytes, a multiple of 16, between addresses that are multiples of 16.
__device__ __forceinline__ void bulk_load(SharedPlace to, const void* from, int bytes,
                                          SharedPlace barrier ESPALIER_TWIN_SITE) {
#ifdef __CUDACC__
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
#else
  emulation::bulk_load(to, from, bytes, barrier, site);
#endif
}

// ---- from shared memory ----

// Adds floats to global memory. Shared memory may be written again behind bulk_read<left>; the sums are there behind
// bulk_done<left>.
__device__ __forceinline__ void bulk_add(float* to, SharedPlace from, int bytes ESPALIER_TWIN_SITE) {
#ifdef __CUDACC__
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
#else
  emulation::bulk_add(to, from, bytes, site);
#endif
}
__device__ __forceinline__ void bulk_commit() {
#ifdef __CUDACC__
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#else
  emulation::bulk_commit();
#endif
}
template <int left>
__device__ __forceinline__ void bulk_read(ESPALIER_ONLY_SITE) {
#ifdef __CUDACC__
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(left) : "memory");
#else
  emulation::bulk_wait(left, true, site);
#endif
}
template <int left>
__device__ __forceinline__ void bulk_done(ESPALIER_ONLY_SITE) {
#ifdef __CUDACC__
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(left) : "memory");
#else
  emulation::bulk_wait(left, false, site);
#endif
}
// Stores four 8 x 8 matrices of 16-bit elements to rows that the lanes name: the counterpart of ldmatrix_x4.
template <bool transposed>
__device__ __forceinline__ void stmatrix_x4(SharedPlace row, const unsigned (&r)[4] ESPALIER_TWIN_SITE) {
#ifdef __CUDACC__
  if constexpr (transposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
#else
  emulation::store_matrices(row, r, transposed, site);
#endif
}

}  // namespace espalier::cuda::hopper
