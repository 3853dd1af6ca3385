// States from chunk to chunk of a run, and their gradients back: a block of threads has 32 value channels of a value
// head of a run. The state stays in registers, in float32; tensor cores read it as high and low numbers.
#include "espalier/ops/cuda/delta_chunk_tiles.h"

namespace espalier::cuda {
namespace {

// Two tiles of keys, the state, two tiles of values.
template <int D>
constexpr int kScanBytes = 2 * KeyTile<D>::kBytes + StateTile<D>::kBytes + 2 * ValueTile::kBytes;

// A warp's part of a state: 16 of its rows and 16 kPairs of 32 channels. Numbers of a state in global memory stand at
// row dv + channel; rows and channels of padding are 0.
template <int D>
struct StatePart {
  static constexpr int kPairs = D / 64;
  int m, n;
  std::int64_t rows, width, first;  // channels from `first` on

  __device__ __forceinline__ StatePart(const DeltaShape& s, std::int64_t block)
      : m(static_cast<int>(threadIdx.x) / 32 % (D / 16) * 16),
        n(static_cast<int>(threadIdx.x) / 32 / (D / 16) * 16),
        rows(s.key_dim),
        width(s.value_dim),
        first(block * kBlockWidth) {}
  __device__ __forceinline__ bool inside(int row, int c) const { return row < rows && first + c < width; }
  __device__ __forceinline__ void load(float (&state)[2 * kPairs][4], const float* from) const {
    for_each_two(state, m, n, [&](int row, int c, float& x, float& y) {
      x = from != nullptr && inside(row, c) ? from[row * width + first + c] : 0.f;
      y = from != nullptr && inside(row, c + 1) ? from[row * width + first + c + 1] : 0.f;
    });
  }
  __device__ __forceinline__ void store(float (&state)[2 * kPairs][4], float* to) const {
    for_each_two(state, m, n, [&](int row, int c, float& x, float& y) {
      if (inside(row, c)) to[row * width + first + c] = x;
      if (inside(row, c + 1)) to[row * width + first + c + 1] = y;
    });
  }
  // Rows times gamma_last.
  __device__ __forceinline__ void decay(float (&state)[2 * kPairs][4], const ChunkPass& pass, std::int64_t tile) const {
    const float of_all = pass.from_start[tile * kChunk + kChunk - 1];
    for_each_two(state, m, n, [&](int row, int, float& x, float& y) {
      const float by = pass.channels ? pass.kept[tile * D + row] : of_all;
      x *= by, y *= by;
    });
  }
  // To shared memory, and to global memory if that is wanted, as high and low numbers.
  __device__ __forceinline__ void split(float (&state)[2 * kPairs][4], const StateTile<D>& tile, bfloat16* to) const {
    for_each_two(state, m, n, [&](int row, int c, float& x, float& y) {
      tile.set_two(row, c, x, y);
      if (to != nullptr) store_two(to, D * kBlockWidth, row * kBlockWidth + c, x, y);
    });
  }
};

// The head and value block of a block of threads, and its shared memory.
template <int D>
struct Scan {
  std::int64_t of_pass, key_of_pass, head, block;
  KeyTile<D> read, k;
  StateTile<D> state;
  ValueTile value, of_o;
  WarpPart warp;

  __device__ __forceinline__ Scan(const ChunkPass& pass, unsigned char* memory)
      : of_pass(blockIdx.y / pass.blocks),
        key_of_pass(of_pass / pass.each),
        head(pass.first_head * pass.each + of_pass),
        block(blockIdx.y % pass.blocks),
        read{memory},
        k{memory + KeyTile<D>::kBytes},
        state{memory + 2 * KeyTile<D>::kBytes},
        value{memory + 2 * KeyTile<D>::kBytes + StateTile<D>::kBytes},
        of_o{memory + 2 * KeyTile<D>::kBytes + StateTile<D>::kBytes + ValueTile::kBytes} {}
  __device__ __forceinline__ std::int64_t tile(const ChunkPass& pass, std::int64_t chunk) const {
    return chunk * pass.heads + of_pass;
  }
  __device__ __forceinline__ std::int64_t key_tile(const ChunkPass& pass, std::int64_t chunk) const {
    return chunk * pass.key_heads + key_of_pass;
  }
};

template <int D>
__global__ void __launch_bounds__(kSplitThreads)
    scan_chunks_kernel(DeltaShape s, DeltaRuns<float> runs, ChunkNumbers numbers, ChunkPass pass) {
  using Part = StatePart<D>;
  const Scan<D> scan(pass, dynamic_shared<unsigned char>());
  const DeltaRun<float> run = runs.of[blockIdx.x];
  const Part part(s, scan.block);
  const int m = scan.warp.m, n = scan.warp.half * 16;
  const bool reads = !s.mamba;
  const std::int64_t matrix = scan.head * s.key_dim * s.value_dim;
  float state[2 * Part::kPairs][4];
  part.load(state, run.start != nullptr ? run.start + matrix : nullptr);
  for (std::int64_t chunk = numbers.first[blockIdx.x]; chunk < numbers.first[blockIdx.x + 1]; ++chunk) {
    const std::int64_t tile = scan.tile(pass, chunk);
    if (reads) fetch_split(scan.read, pass.read + tile * kKeyNumbers<D>);
    fetch_split(scan.k, keys_to_end<D>(pass, tile, scan.key_tile(pass, chunk)));
    cp_async_commit();
    bfloat16* const u = pass.u + (tile * pass.blocks + scan.block) * kValueNumbers;
    float update[2][4], seen[2][4];
    load_floats<kBlockWidth>(update, m, n, reinterpret_cast<const float*>(u));
    clear(seen);
    part.split(state, scan.state,
               pass.states == nullptr ? nullptr : pass.states + (tile * pass.blocks + scan.block) * kStateNumbers<D>);
    cp_async_wait<0>();
    __syncthreads();
    if (reads) add_product<Stored::plain, Stored::plain, 1>(seen, scan.read, m, scan.state, n, D);
#pragma unroll
    for (int i = 0; i < 8; ++i) update[i / 4][i % 4] -= seen[i / 4][i % 4];
    for_each_two(update, m, n, [&](int i, int c, float x, float y) {
      const float w = pass.to_end[tile * kChunk + i];
      scan.value.set_two(i, c, w * x, w * y);
      store_two(u, kChunk * kBlockWidth, i * kBlockWidth + c, x, y);
    });
    __syncthreads();
    part.decay(state, pass, tile);
    add_product<Stored::turned, Stored::plain, Part::kPairs>(state, scan.k, part.m, scan.value, part.n, kChunk);
    __syncthreads();  // the tiles are read
  }
  if (pass.ends && run.end_state != nullptr) part.store(state, run.end_state + matrix);
}

template <int D>
__global__ void __launch_bounds__(kSplitThreads)
    scan_chunks_backward_kernel(DeltaShape s, DeltaRuns<float> runs, ChunkNumbers numbers, ChunkPass pass,
                                const bfloat16* grad_o_TV, float* state_part) {
  using Part = StatePart<D>;
  const Scan<D> scan(pass, dynamic_shared<unsigned char>());
  const DeltaRun<float> run = runs.of[blockIdx.x];
  const Part part(s, scan.block);
  const int m = scan.warp.m, n = scan.warp.half * 16;
  const bool reads = !s.mamba;
  const std::int64_t matrix = scan.head * s.key_dim * s.value_dim;
  float grad[2 * Part::kPairs][4];
  part.load(grad, run.grad_end != nullptr ? run.grad_end + matrix : nullptr);
  for (std::int64_t chunk = numbers.first[blockIdx.x + 1] - 1; chunk >= numbers.first[blockIdx.x]; --chunk) {
    const std::int64_t tile = scan.tile(pass, chunk), key_tile = scan.key_tile(pass, chunk);
    const float *const from_start = pass.from_start + tile * kChunk, *const beta = pass.beta + tile * kChunk;
    fetch_split(scan.read, pass.written + tile * kKeyNumbers<D>);
    fetch_split(scan.k, keys_from_start<D>(pass, tile, key_tile));
    cp_async_commit();
    bfloat16* const of_u = pass.of_u + (tile * pass.blocks + scan.block) * kValueNumbers;
    float of_value[2][4];
    load_floats<kBlockWidth>(of_value, m, n, reinterpret_cast<const float*>(of_u));
    part.split(grad, scan.state, pass.grads + (tile * pass.blocks + scan.block) * kStateNumbers<D>);
    GradRows(s, grad_o_TV, rows_of_chunk(numbers, runs, chunk), scan.head).load(scan.of_o, scan.block, from_start);
    cp_async_wait<0>();
    __syncthreads();
    add_product<Stored::plain, Stored::plain, 1>(of_value, scan.read, m, scan.state, n, D);
    for_each_two(of_value, m, n, [&](int i, int c, float x, float y) {
      const float factor = -beta[i] * from_start[i];
      scan.value.set_two(i, c, factor * x, factor * y);
      store_two(of_u, kChunk * kBlockWidth, i * kBlockWidth + c, x, y);
    });
    __syncthreads();
    fetch_split(scan.read, queries_from_start<D>(pass, tile, key_tile));  // in the place of Z
    cp_async_commit();
    part.decay(grad, pass, tile);
    if (reads)
      add_product<Stored::turned, Stored::plain, Part::kPairs>(grad, scan.k, part.m, scan.value, part.n, kChunk);
    cp_async_wait<0>();
    __syncthreads();
    add_product<Stored::turned, Stored::plain, Part::kPairs>(grad, scan.read, part.m, scan.of_o, part.n, kChunk);
    __syncthreads();  // the tiles are read
  }
  if (run.grad_start != nullptr)
    part.store(grad, state_part + blockIdx.x * (matrix_of(s) + (s.kernel - 1) * s.channels) + matrix);
}

template <int D>
void scan_forward(const DeltaShape& shape, const DeltaRuns<float>& runs, const ChunkNumbers& numbers,
                  const ChunkPass& pass) {
  launch(scan_chunks_kernel<D>, {runs.count, pass.heads * pass.blocks}, kSplitThreads, kScanBytes<D>, shape, runs,
         numbers, pass);
}
template <int D>
void scan_backward(const DeltaShape& shape, const DeltaRuns<float>& runs, const ChunkNumbers& numbers,
                   const ChunkPass& pass, const bfloat16* grad_o_TV, float* state_part) {
  launch(scan_chunks_backward_kernel<D>, {runs.count, pass.heads * pass.blocks}, kSplitThreads, kScanBytes<D>, shape,
         runs, numbers, pass, grad_o_TV, state_part);
}

}  // namespace

void scan_chunks(const DeltaShape& shape, const DeltaRuns<float>& runs, const ChunkNumbers& numbers,
                 const ChunkPass& pass) {
  (pass.width == 64 ? scan_forward<64> : scan_forward<128>)(shape, runs, numbers, pass);
}

void scan_chunks_backward(const DeltaShape& shape, const DeltaRuns<float>& runs, const ChunkNumbers& numbers,
                          const ChunkPass& pass, const bfloat16* grad_o_TV, float* state_part) {
  (pass.width == 64 ? scan_backward<64> : scan_backward<128>)(shape, runs, numbers, pass, grad_o_TV, state_part);
}

}  // namespace espalier::cuda
