// The part of the chunked delta rule that needs no state: A = (I + B strictly_lower(D K K^T))^-1 and its products. A
// block of threads has a chunk of a value head. Blocks of 16 rows of A are solved row by row in float32; the others
// follow from products. A series of powers would be shorter, but its terms are larger than A by up to 10^18.
#include "espalier/ops/cuda/delta_chunk_tiles.h"

namespace espalier::cuda {
namespace {

constexpr int kSolved = 16;  // rows of a block

// Shared memory in bytes: K; Q, then P and two tiles of values; A; L = B N, then A scaled.
template <int D>
struct PrepareRoom {
  static constexpr int kKeys = KeyTile<D>::kBytes, kSquare = SquareTile::kBytes, kValues = 2 * ValueTile::kBytes;
  static constexpr int kMiddle = kKeys < kSquare + kValues ? kSquare + kValues : kKeys;
  static constexpr int kBytes = kKeys + kMiddle + 2 * kSquare;
};
struct SolvedRows {
  float of[kChunk / kSolved][kSolved][kSolved + 1];
};
static_assert(sizeof(SolvedRows) <= 2 * ValueTile::kBytes);

// The inverse of a block of 16 rows on the diagonal: a thread has one of its columns.
__device__ __forceinline__ void invert_blocks(const SolvedRows& system, const SquareTile& inverse) {
  if (threadIdx.x >= kChunk) return;
  const int block = static_cast<int>(threadIdx.x) / kSolved, column = static_cast<int>(threadIdx.x) % kSolved;
  float x[kSolved] = {};
#pragma unroll
  for (int i = 0; i < kSolved; ++i) {
    float sum = i == column ? 1.f : 0.f;
#pragma unroll
    for (int j = 0; j < i; ++j) sum -= system.of[block][i][j] * x[j];
    x[i] = sum;
    inverse.set(block * kSolved + i, block * kSolved + column, sum);
  }
}

// Two inverses of R rows to one of 2 R rows: below the diagonal stands - A22 L21 A11. A warp has 16 of its rows; A22
// L21 is kept in the place of L21. All threads call.
template <int R>
__device__ __forceinline__ void join_inverses(const SquareTile& system, const SquareTile& inverse) {
  constexpr int kStrips = R / 16, kPairs = R / 16;
  const int warp = static_cast<int>(threadIdx.x) / 32, first = warp / kStrips * 2 * R;
  const int m = first + R + warp % kStrips * 16;
  const bool mine = first < kChunk;
  float sum[2 * kPairs][4];
  clear(sum);
  if (mine) add_product<Stored::plain, Stored::plain, kPairs>(sum, inverse, m, system, first, first + 2 * R, first + R);
  __syncthreads();
  if (mine) for_each_two(sum, m, first, [&](int i, int j, float x, float y) { system.set_two(i, j, x, y); });
  __syncthreads();
  clear(sum);
  if (mine) {
    add_product<Stored::plain, Stored::plain, kPairs>(sum, system, m, inverse, first, first + R, first);
    for_each_two(sum, m, first, [&](int i, int j, float x, float y) { inverse.set_two(i, j, -x, -y); });
  }
  __syncthreads();
}

// to_ij = A_ij factor(i, j). All threads call.
template <class Factor>
__device__ __forceinline__ void scale_inverse(const SquareTile& inverse, const SquareTile& to, Factor factor) {
  __syncthreads();  // what stood in its place is read
  for (int at = static_cast<int>(threadIdx.x); at < kChunk * kChunk; at += kSplitThreads)
    to.set(at / kChunk, at % kChunk, inverse.get(at / kChunk, at % kChunk) * factor(at / kChunk, at % kChunk));
  __syncthreads();
}

template <int D>
__global__ void __launch_bounds__(kSplitThreads, 2)
    prepare_chunk_kernel(DeltaShape s, DeltaRuns<float> runs, ChunkNumbers numbers, ChunkPass pass,
                         const bfloat16* grad_o_TV) {
  using Room = PrepareRoom<D>;
  ESPALIER_SHARED(double[kChunk], sums);
  ESPALIER_SHARED(float[4 * kChunk], of_rows);  // log decays, beta, e^G, w
  float *const log_decay = of_rows, *const beta = of_rows + kChunk, *const from_start = of_rows + 2 * kChunk,
               *const to_end = of_rows + 3 * kChunk;
  unsigned char* const memory = dynamic_shared<unsigned char>();
  const KeyTile<D> k{memory}, q{memory + Room::kKeys};
  unsigned char* const values = memory + Room::kKeys + Room::kSquare;
  const SquareTile seen{memory + Room::kKeys}, inverse{memory + Room::kKeys + Room::kMiddle},
      system{memory + Room::kKeys + Room::kMiddle + Room::kSquare};
  const WarpPart part;
  const int m = part.m;
  const ValueTile value{values + part.half * ValueTile::kBytes};  // of this half of the warps
  const std::int64_t chunk = blockIdx.x, of_pass = blockIdx.y, tile = chunk * pass.heads + of_pass,
                     key_tile = chunk * pass.key_heads + of_pass / pass.each;
  const bool reads = !s.mamba, backward = grad_o_TV != nullptr;
  fetch_split(k, keys_from_start<D>(pass, tile, key_tile));
  if (backward && !pass.channels) fetch_split(q, pass.q + key_tile * kKeyNumbers<D>);
  cp_async_commit();
  if (threadIdx.x < kChunk) {
    log_decay[threadIdx.x] = pass.log_decay[tile * kChunk + threadIdx.x];
    beta[threadIdx.x] = pass.beta[tile * kChunk + threadIdx.x];
  }
  __syncthreads();
  sum_decays(log_decay, sums);
  if (threadIdx.x < kChunk) {
    const int row = static_cast<int>(threadIdx.x);
    from_start[row] = pass.from_start[tile * kChunk + row] = std::exp(static_cast<float>(sums[row]));
    to_end[row] = pass.to_end[tile * kChunk + row] = decay_between(sums, kChunk - 1, row);
  }
  float of_keys[4][4], of_queries[4][4];
  clear(of_keys), clear(of_queries);
  cp_async_wait<0>();
  __syncthreads();
  if (pass.channels) {
    load_floats<kChunk>(of_keys, m, part.half * 32, pass.key_pairs + tile * kChunk * kChunk);
    if (backward) load_floats<kChunk>(of_queries, m, part.half * 32, pass.query_pairs + tile * kChunk * kChunk);
  } else {
    if (reads) add_product<Stored::plain, Stored::turned, 2>(of_keys, k, m, k, part.half * 32, D);
    if (backward) add_product<Stored::plain, Stored::turned, 2>(of_queries, q, m, k, part.half * 32, D);
  }
  __syncthreads();  // the queries are read
  SolvedRows& solved = *reinterpret_cast<SolvedRows*>(values);
  const auto of_system = [&](int i, int j, float product) {
    const float x = i > j ? beta[i] * decay_between(sums, i, j) * product : 0.f;
    if (i / kSolved == j / kSolved) solved.of[i / kSolved][i % kSolved][j % kSolved] = x;
    return x;
  };
  for_each_two(of_keys, m, part.half * 32, [&](int i, int j, float x, float y) {
    const float first = of_system(i, j, x), second = of_system(i, j + 1, y);
    system.set_two(i, j, first, second);
    inverse.set_two(i, j, 0.f, 0.f);
  });
  if (backward) store_seen(of_queries, m, part.half * 32, sums, seen);
  __syncthreads();
  invert_blocks(solved, inverse);
  __syncthreads();
  join_inverses<16>(system, inverse);
  join_inverses<32>(system, inverse);

  float wide[D / 16][4];  // 16 rows and D / 2 columns
  const auto store_keys = [&](bfloat16* to) {
    for_each_two(wide, m, part.half * (D / 2), [&](int i, int c, float x, float y) {
      store_two(to + tile * kKeyNumbers<D>, kChunk * D, i * D + c, x, y);
    });
  };
  if (reads) {
    scale_inverse(inverse, system, [&](int, int j) { return beta[j] * from_start[j]; });
    clear(wide);
    add_product<Stored::plain, Stored::plain, D / 32>(wide, system, m, k, part.half * (D / 2), kChunk);
    store_keys(pass.read);
  }
  if (backward) {
    scale_inverse(inverse, system, [&](int i, int) { return to_end[i]; });
    if (pass.channels) {
      fetch_split(k, pass.to_end_k + tile * kKeyNumbers<D>);
      cp_async_commit();
      cp_async_wait<0>();
      __syncthreads();
    }
    clear(wide);
    add_product<Stored::turned, Stored::plain, D / 32>(wide, system, m, k, part.half * (D / 2), kChunk);
    store_keys(pass.written);
  }
  scale_inverse(inverse, system, [&](int, int j) { return beta[j]; });
  const std::int64_t head = pass.first_head * pass.each + of_pass;
  const GradRows grad_o(s, grad_o_TV, rows_of_chunk(numbers, runs, chunk), head);
  float sum[4][4];  // 16 rows of a block of value channels
  const auto store_values = [&](bfloat16* to, std::int64_t block) {
    store_floats<kBlockWidth>(sum, m, 0, reinterpret_cast<float*>(to + (tile * pass.blocks + block) * kValueNumbers));
  };
  for (std::int64_t first = 0; first < pass.blocks; first += 2) {  // a block for each half of the warps
    const std::int64_t block = first + part.half;
    const bool mine = block < pass.blocks;
    for (int i = 0; i < 2 && first + i < pass.blocks; ++i)
      fetch_split(ValueTile{values + i * ValueTile::kBytes}, pass.u + (tile * pass.blocks + first + i) * kValueNumbers);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    clear(sum);
    if (mine) {
      add_product<Stored::plain, Stored::plain, 2>(sum, system, m, value, 0, kChunk);
      store_values(pass.u, block);
    }
    __syncthreads();  // the values are read
    if (!backward) continue;
    for (int i = 0; i < 2 && first + i < pass.blocks; ++i)
      grad_o.load(ValueTile{values + i * ValueTile::kBytes}, first + i, nullptr);
    __syncthreads();
    clear(sum);
    if (mine) add_product<Stored::turned, Stored::plain, 2>(sum, seen, m, value, 0, kChunk);
    __syncthreads();  // grad_o is read
    if (mine) for_each_two(sum, m, 0, [&](int i, int c, float x, float y) { value.set_two(i, c, x, y); });
    __syncthreads();
    clear(sum);
    if (mine) {
      add_product<Stored::turned, Stored::plain, 2>(sum, inverse, m, value, 0, kChunk);
      store_values(pass.of_u, block);
    }
    __syncthreads();  // the products are read
  }
}

}  // namespace

void prepare_chunks(const DeltaShape& shape, const DeltaRuns<float>& runs, const ChunkNumbers& numbers,
                    const ChunkPass& pass, const bfloat16* grad_o_TV) {
  const bool narrow = pass.width == 64;
  launch(narrow ? prepare_chunk_kernel<64> : prepare_chunk_kernel<128>, {pass.chunks, pass.heads}, kSplitThreads,
         narrow ? PrepareRoom<64>::kBytes : PrepareRoom<128>::kBytes, shape, runs, numbers, pass, grad_o_TV);
}

}  // namespace espalier::cuda
