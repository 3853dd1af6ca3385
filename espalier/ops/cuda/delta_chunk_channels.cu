// The first step of chunks with decays of channels, before the steps that all chunks share: the products of pairs of
// rows D Q K^T and D K K^T, and gamma Q, gamma K and w K. A block of threads has a chunk of a value head.
#include "espalier/ops/cuda/delta_chunk_channels.h"

namespace espalier::cuda {
namespace {

// Shared memory: K, Q and decays in float; then left K, left Q and right K.
template <int D>
constexpr int kPairBytes = 3 * KeyTile<D>::kBytes;

// Rows in float [64, D], times gamma or w, to global memory; gamma_last.
template <int D>
__device__ __forceinline__ void store_scaled(const ChunkPass& pass, std::int64_t tile, const float* k, const float* q,
                                             const float* decay) {
  for_each_strip<D>([&](int strip, int c) {
    const int first = strip * kStripRows, last = first + kStripRows - 1;
    const auto put = [&](bfloat16* to, int row, float x) {
      store_one(to + tile * kKeyNumbers<D>, kChunk * D, row * D + c, x);
    };
    float factor = decay_of_rows(decay + c, 0, first - 1, D);
    for (int row = first; row <= last; ++row) {
      factor *= decay[row * D + c];
      put(pass.from_start_k, row, factor * k[row * D + c]);
      if (pass.from_start_q != nullptr) put(pass.from_start_q, row, factor * q[row * D + c]);
    }
    if (strip == kStrips - 1) pass.kept[tile * D + c] = factor;
    factor = decay_of_rows(decay + c, last + 1, kChunk - 1, D);
    for (int row = last; row >= first; --row) {
      put(pass.to_end_k, row, factor * k[row * D + c]);
      factor *= decay[row * D + c];
    }
  });
}

// Pairs within a strip: eight columns a warp, and four lanes a column, each with every fourth channel.
template <int D>
__device__ __forceinline__ void store_strip_pairs(const float* k, const float* q, const float* decay, float* key_pairs,
                                                  float* query_pairs) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int first = warp / 2 * kStripRows, column = warp % 2 * 8 + lane / 4;
  float of_keys[kStripRows] = {}, of_queries[kStripRows] = {};
  for (int c = lane % 4; c < D; c += 4) {
    float decayed = k[(first + column) * D + c];
#pragma unroll
    for (int i = 0; i < kStripRows; ++i) {
      if (i < column) continue;
      const int at = (first + i) * D + c;
      if (i > column) decayed *= decay[at];
      of_keys[i] += k[at] * decayed;
      of_queries[i] += q[at] * decayed;
    }
  }
#pragma unroll
  for (int i = 0; i < kStripRows; ++i) {
    const float of_key = warp_sum<4>(of_keys[i]), of_query = warp_sum<4>(of_queries[i]);
    const int at = (first + i) * kChunk + first + column;
    if (i < column || lane % 4 != i % 4) continue;
    key_pairs[at] = of_key;
    if (query_pairs != nullptr) query_pairs[at] = of_query;
  }
}

template <int D>
__global__ void __launch_bounds__(kSplitThreads, 2) channel_pairs_kernel(ChunkPass pass) {
  constexpr int kKeys = KeyTile<D>::kBytes;
  unsigned char* const memory = dynamic_shared<unsigned char>();
  float *const k = reinterpret_cast<float*>(memory), *const q = k + kChunk * D, *const decays = q + kChunk * D;
  const KeyTile<D> left_k{memory}, left_q{memory + kKeys}, right_k{memory + 2 * kKeys};
  const std::int64_t tile = blockIdx.x * pass.heads + blockIdx.y,
                     key_tile = blockIdx.x * pass.key_heads + blockIdx.y / pass.each;
  const bfloat16 *const of_k = pass.k + key_tile * kKeyNumbers<D>, *const of_q = pass.q + key_tile * kKeyNumbers<D>;
  const float* const decay = pass.decay + tile * kChunk * D;
  float* const key_pairs = pass.key_pairs + tile * kChunk * kChunk;
  float* const query_pairs = pass.query_pairs != nullptr ? pass.query_pairs + tile * kChunk * kChunk : nullptr;
  for (int at = static_cast<int>(threadIdx.x); at < kChunk * D; at += kSplitThreads) {
    k[at] = load_one(of_k, kChunk * D, at);
    q[at] = load_one(of_q, kChunk * D, at);
    decays[at] = decay[at];
  }
  __syncthreads();
  store_scaled<D>(pass, tile, k, q, decays);
  store_strip_pairs<D>(k, q, decays, key_pairs, query_pairs);
  __syncthreads();  // the rows are read
  fill_left(left_k, of_k, decay);
  fill_left(left_q, of_q, decay);
  // A warp has a strip of earlier rows, and its products with keys or with queries of a later one.
  const int warp = static_cast<int>(threadIdx.x) / 32, strip = warp % kStrips;
  const bool keys = warp < kStrips;
  for (int strips = 1; strips < kStrips; ++strips) {
    fill_right(right_k, of_k, decay, strips);
    __syncthreads();
    if (strip + strips < kStrips && (keys || query_pairs != nullptr)) {
      const int m = (strip + strips) * kStripRows, n = strip * kStripRows;
      float sum[2][4];
      clear(sum);
      add_product<Stored::plain, Stored::turned, 1>(sum, KeyTile<D>{memory + (keys ? 0 : kKeys)}, m, right_k, n, D);
      store_floats<kChunk>(sum, m, n, keys ? key_pairs : query_pairs);
    }
    __syncthreads();  // right K is read
  }
}

}  // namespace

void channel_pairs(const ChunkPass& pass) {
  const bool narrow = pass.width == 64;
  launch(narrow ? channel_pairs_kernel<64> : channel_pairs_kernel<128>, {pass.chunks, pass.heads}, kSplitThreads,
         narrow ? kPairBytes<64> : kPairBytes<128>, pass);
}

}  // namespace espalier::cuda
