// The first part of a chunk's gradients: sums over value channels, block by block.
#pragma once

#include "espalier/ops/cuda/delta_chunk_tiles.h"

namespace espalier::cuda {

// Shared memory. First S, dS', U, dA, dO of a block of value channels; then two tiles of rows, X, Y.
template <int D>
struct GradientRoom {
  static constexpr int kState = StateTile<D>::kBytes, kValue = ValueTile::kBytes, kKey = KeyTile<D>::kBytes;
  static constexpr int kBytes = 2 * kKey + 2 * SquareTile::kBytes;
  static_assert(2 * kState + 3 * kValue <= kBytes);
};

// A lane's numbers of dO S^T, dA S^T, U dS'^T, dO U^T and dA U^T.
template <int D>
struct ValueSums {
  float grad_q[D / 16][4], read_k[D / 16][4], written_k[D / 16][4], x_ij[4][4], y_ij[4][4];

  // Calls body(S, dS') for each block. All threads call.
  template <class Body>
  __device__ __forceinline__ void add_all(const ChunkPass& pass, std::int64_t tile, const GradRows& grad_o, bool reads,
                                          unsigned char* memory, Body body) {
    using Room = GradientRoom<D>;
    const StateTile<D> state{memory}, grad{memory + Room::kState};
    unsigned char* const values = memory + 2 * Room::kState;
    const ValueTile u{values}, of_u{values + Room::kValue}, of_o{values + 2 * Room::kValue};
    const WarpPart part;
    const int m = part.m, n = part.half * 32, wide_n = part.half * (D / 2);
    clear(grad_q), clear(read_k), clear(written_k), clear(x_ij), clear(y_ij);
    for (std::int64_t block = 0; block < pass.blocks; ++block) {
      const std::int64_t at = tile * pass.blocks + block;
      fetch_split(state, pass.states + at * kStateNumbers<D>);
      fetch_split(grad, pass.grads + at * kStateNumbers<D>);
      fetch_split(u, pass.u + at * kValueNumbers);
      fetch_split(of_u, pass.of_u + at * kValueNumbers);
      cp_async_commit();
      grad_o.load(of_o, block, nullptr);
      cp_async_wait<0>();
      __syncthreads();
      add_product<Stored::plain, Stored::turned, D / 32, true>(grad_q, of_o, m, state, wide_n, kBlockWidth);
      if (reads) add_product<Stored::plain, Stored::turned, D / 32>(read_k, of_u, m, state, wide_n, kBlockWidth);
      add_product<Stored::plain, Stored::turned, D / 32>(written_k, u, m, grad, wide_n, kBlockWidth);
      add_product<Stored::plain, Stored::turned, 2, true>(x_ij, of_o, m, u, n, kBlockWidth);
      if (reads) add_product<Stored::plain, Stored::turned, 2>(y_ij, of_u, m, u, n, kBlockWidth);
      body(state, grad);
      __syncthreads();  // the tiles are read
    }
  }
};

// A lane's numbers of dO U^T or dA U^T to a tile, below the diagonal, times factor(i, j); those on it to `own`.
template <class Factor>
__device__ __forceinline__ void store_pairs(float (&of_pairs)[4][4], int m, int n, const SquareTile& tile, float* own,
                                            Factor factor) {
  for_each_two(of_pairs, m, n, [&](int i, int j, float x, float y) {
    if (i == j) own[i] = x;
    if (i == j + 1) own[i] = y;
    tile.set_two(i, j, i > j ? factor(i, j) * x : 0.f, i > j + 1 ? factor(i, j + 1) * y : 0.f);
  });
}

}  // namespace espalier::cuda
