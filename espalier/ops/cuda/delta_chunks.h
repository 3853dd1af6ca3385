// The gated delta rule and Mamba-2 in chunks of 64 rows, whose products run on tensor cores (split_tiles.h has what
// they lose). T is bfloat16, decays are of heads or of channels. A chunk never reaches into the next run: a run begins
// with the state of its parent, in float32, and its last chunk is filled up with rows of zeros, which change nothing.
//
// A chunk of a value head, with the state S before it and G = cumsum g (names: ops/cpu/delta_rule_ranges.h):
//   D_ij = e^(G_i - G_j) (j <= i, else 0),  gamma = e^G,  w = e^(G_last - G),  B = diag(beta)
//   A = (I + B strictly_lower(D K K^T))^-1,  W = A B gamma K,  U = A B V - W S,  S' = gamma_last S + (w K)^T U
// and backward, with dS' behind it and P = D Q K^T:
//   Z = A^T w K,  dA = A^T P^T dO + Z dS',  dS = gamma_last dS' + (gamma Q)^T dO - (beta gamma K)^T dA
//   X = D dO U^T,  Y = - strictly_lower(D B dA U^T)
//   dQ = gamma dO S^T + X K,  dK = Y K - beta gamma dA S^T + X^T Q + Y^T K + w U dS'^T,  dV = beta dA
// Mamba-2 does not read its state: A = I, W = 0, Y = 0, and dK and dS lose their terms with beta gamma.
// A, W, U, Z and what does not need dS' are made for all chunks at once, then S and dS' chunk by chunk, then the rest.
//
// With decays of channels (delta_chunk_channels.h) G has a column for each channel c. gamma Q, gamma K and w K are
// products number by number, gamma_last S is diag(gamma_last) S, and P and D K K^T are sums over channels:
//   P_ij = sum_c e^(G_ic - G_jc) q_ic k_jc
// They are made first; the steps up to S and dS' then see decays of rows that are 1. X and Y are without D, and
//   dQ_ic = gamma_ic (dO S^T)_ic + sum_j X_ij e^(G_ic - G_jc) k_jc, dK alike
// All give the gradients of log decays: dG = Q dQ + K dK (that of reads) - K dK (that of writes), number by number
// (with decays of heads summed over channels), dG_last += gamma_last S dS' + sum w K U dS'^T, and dg sums dG from the
// end on.
#pragma once

#include <type_traits>

#include "espalier/ops/cuda/delta_rule.h"
#include "espalier/ops/cuda/launch.h"

namespace espalier::cuda {

inline constexpr std::int64_t kChunkRows = 64, kValueBlock = 32;  // rows of a chunk, value channels of a tile

// Chunks of the runs of a launch, numbered one run behind the other; a run without rows has one.
struct ChunkNumbers {
  std::int64_t first[kRunsAtOnce + 1];
};

// Some key heads of a launch. A tile of rows is [64, dk padded to `width`], high numbers then low ones, or float; tiles
// of values and states stand by blocks of 32 value channels.
struct ChunkPass {
  std::int64_t chunks = 0, first_head = 0, key_heads = 0;   // key heads first_head, ...
  std::int64_t each = 0, heads = 0, blocks = 0, width = 0;  // value heads of a key head, of all; value blocks
  bool ends = false;                                        // runs' last states are wanted
  bool channels = false;                                    // decays are of channels
  bfloat16 *q = nullptr, *k = nullptr;                      // [chunks, key heads]
  // [chunks, heads]:
  bfloat16* u = nullptr;                              // V, then A B V in float, then U
  bfloat16* of_u = nullptr;                           // A^T P^T dO in float, then dA
  bfloat16 *read = nullptr, *written = nullptr;       // W, then dQ in float; Z, then dK in float
  bfloat16 *states = nullptr, *grads = nullptr;       // S, dS', each [blocks][2][width][32]
  float *log_decay = nullptr, *beta = nullptr;        // [64], also the next ones
  float *from_start = nullptr, *to_end = nullptr;     // gamma, w
  float *of_log_decay = nullptr, *of_beta = nullptr;  // gradients; that of beta times beta
  // With decays of channels:
  float *decay = nullptr, *kept = nullptr;             // [64, width]; its columns' products, gamma_last
  bfloat16* from_start_k = nullptr;                    // gamma K, then the decays' gradients [64, width] in float
  bfloat16* from_start_q = nullptr;                    // gamma Q, then (X^T Q + Y^T K) in float
  bfloat16* to_end_k = nullptr;                        // w K, then U dS'^T in float
  float *query_pairs = nullptr, *key_pairs = nullptr;  // P and D K K^T, [64, 64]; not written above the diagonal
};

// The purpose of a pass: the states that runs end with, and outputs; or gradients.
enum class ChunkUse { states, outputs, gradients };

// Sums of a chunk, for each parameter [chunks, its numbers].
struct ChunkSums {
  float *conv, *bias, *a_log, *dt_bias, *skip;
};

// Gives the arrays of a pass their places from `memory` on; returns the bytes that they take.
inline std::int64_t set_places(ChunkPass& p, ChunkUse use, unsigned char* memory) {
  std::int64_t at = 0;
  const auto take = [&](auto*& array, std::int64_t bytes) {
    array = memory != nullptr ? reinterpret_cast<std::remove_reference_t<decltype(array)>>(memory + at) : nullptr;
    at += bytes;
  };
  const std::int64_t tiles = p.chunks * p.heads, rows = kChunkRows * 4;
  take(p.q, p.chunks * p.key_heads * rows * p.width), take(p.k, p.chunks * p.key_heads * rows * p.width);
  const std::int64_t values = tiles * rows * p.blocks * kValueBlock, keys = tiles * rows * p.width;
  const std::int64_t state = tiles * p.width * p.blocks * kValueBlock * 4;
  take(p.u, values), take(p.read, keys);
  for (float** const numbers : {&p.log_decay, &p.beta, &p.from_start, &p.to_end}) take(*numbers, tiles * rows);
  if (use != ChunkUse::states) take(p.states, state);
  if (use == ChunkUse::gradients) {
    take(p.of_u, values), take(p.written, keys), take(p.grads, state);
    if (!p.channels) take(p.of_log_decay, tiles * rows);
    take(p.of_beta, tiles * rows);
  }
  if (p.channels) {
    const std::int64_t pairs = tiles * rows * kChunkRows;
    take(p.decay, keys), take(p.kept, tiles * p.width * 4);
    take(p.from_start_k, keys), take(p.to_end_k, keys), take(p.key_pairs, pairs);
    p.of_log_decay = reinterpret_cast<float*>(p.from_start_k);
    if (use != ChunkUse::states) take(p.from_start_q, keys), take(p.query_pairs, pairs);
  }
  return at;
}

#if defined(__CUDACC__) || defined(ESPALIER_EMULATED)

// A chunk's run and rows.
struct ChunkRows {
  std::int64_t run, first, rows;
  bool begins;  // its run
};
__device__ __forceinline__ ChunkRows rows_of_chunk(const ChunkNumbers& numbers, const DeltaRuns<float>& runs,
                                                   std::int64_t chunk) {
  std::int64_t run = 0;
  while (chunk >= numbers.first[run + 1]) ++run;
  const std::int64_t first = runs.of[run].begin + (chunk - numbers.first[run]) * kChunkRows,
                     rest = runs.of[run].end - first;
  return {run, first, rest < kChunkRows ? rest : kChunkRows, chunk == numbers.first[run]};
}

#endif

// Rows to tiles: q, k, v, beta and the logarithms of decays.
void chunk_rows(const DeltaShape& shape, const DeltaWeights<bfloat16>& weights, const DeltaRuns<float>& runs,
                const ChunkNumbers& numbers, const ChunkPass& pass);
// With decays of channels: products of pairs of rows, and the rows' products with gamma and w.
void channel_pairs(const ChunkPass& pass);
// A and its products; those for the backward if there is grad_o.
void prepare_chunks(const DeltaShape& shape, const DeltaRuns<float>& runs, const ChunkNumbers& numbers,
                    const ChunkPass& pass, const bfloat16* grad_o_TV);
// States before chunks, and U.
void scan_chunks(const DeltaShape& shape, const DeltaRuns<float>& runs, const ChunkNumbers& numbers,
                 const ChunkPass& pass);
// The last inputs of the convolution to the runs' end states (delta_rule.cu).
void store_inputs(const DeltaShape& shape, const DeltaWeights<bfloat16>& weights, const DeltaRuns<float>& runs);
// Outputs of rows.
void chunk_outputs(const DeltaShape& shape, const DeltaWeights<bfloat16>& weights, const DeltaRuns<float>& runs,
                   const ChunkNumbers& numbers, const ChunkPass& pass, bfloat16* o_TV);
// Gradients behind chunks, and dA; the gradients of the states that runs begin with go to state_part [runs, state].
void scan_chunks_backward(const DeltaShape& shape, const DeltaRuns<float>& runs, const ChunkNumbers& numbers,
                          const ChunkPass& pass, const bfloat16* grad_o_TV, float* state_part);
// dQ, dK and the gradients of decays and steps.
void chunk_gradients(const DeltaShape& shape, const DeltaRuns<float>& runs, const ChunkNumbers& numbers,
                     const ChunkPass& pass, const bfloat16* grad_o_TV);
// The same with decays of channels.
void channel_gradients(const DeltaShape& shape, const DeltaRuns<float>& runs, const ChunkNumbers& numbers,
                       const ChunkPass& pass, const bfloat16* grad_o_TV);
// Through norms, activations and the convolution to projected rows and sums of parameters.
void chunk_rows_backward(const DeltaShape& shape, const DeltaWeights<bfloat16>& weights, const DeltaRuns<float>& runs,
                         const ChunkNumbers& numbers, const ChunkPass& pass, const bfloat16* grad_o_TV,
                         bfloat16* grad_projected_TW, const ChunkSums& sums, float* state_part);

inline constexpr std::int64_t kMostChunkKeys = 128, kMostChunkValues = 256;
bool fits_chunks(const DeltaShape& shape);
// A pass takes as many key heads as have room in this many bytes, at least one.
inline constexpr std::int64_t kMostPassBytes = std::int64_t{2} << 30;
// Runs of fewer rows go forward row by row.
inline constexpr std::int64_t kLeastChunkedRows = 16;
// Does the same as delta_rule (delta_rule.h), for shapes that fit.
void chunked_delta_rule(const DeltaShape& shape, const DeltaWeights<bfloat16>& weights, const DeltaRuns<float>& runs,
                        bfloat16* o_TV);
// Does the same as add_delta_rule_backward (delta_rule.h), for shapes that fit.
void add_chunked_backward(const DeltaShape& shape, const DeltaWeights<bfloat16>& weights, const DeltaRuns<float>& runs,
                          const bfloat16* grad_o_TV, bfloat16* grad_projected_TW, const DeltaSums<float>& sums);

}  // namespace espalier::cuda
