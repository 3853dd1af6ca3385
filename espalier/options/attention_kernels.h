// The kernels that attention may run on: a row for each. The words of --attention, its help, the chooser on a GPU, the
// forecast, notes and errors read these rows. Each row's functions are in ops/cuda, opened by the name of the row
// (ops/cuda/open_attention.h).
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace espalier {

// ROW(enumerator, "word", "what they are, for the help", members of AttentionKernelsRow ...)
#define ESPALIER_ATTENTION_KERNELS(ROW)                                                                          \
  ROW(own, "own", "this library's", .on_cpu = true, .tried = 3)                                                  \
  ROW(flash, "flash", "ATen's FlashAttention", .on_cpu = true, .tried = 2, .composed = true, .head_multiple = 8, \
      .largest_head = 256, .backward_bytes = flash_backward_bytes)                                               \
  ROW(cudnn, "cudnn", "cuDNN's, for compute capabilities 9.0 and 10.x", .capability = 90, .and_newer = 109,      \
      .tried = 1, .composed = true, .head_multiple = 8, .largest_head = 256, .largest_head_newer = 128,          \
      .fewest_rows = 128, .ordered_rows = 2048, .backward_bytes = cudnn_backward_bytes)                          \
  ROW(hopper, "hopper", "this library's for compute capability 9.0, not yet run on a GPU", .capability = 90)     \
  ROW(hopper_split, "hopper-split", "the same without sums of gradients in memory", .capability = 90)

enum class AttentionKernels : std::uint8_t {
  automatic,
#define ESPALIER_ROW(name, ...) name,
  ESPALIER_ATTENTION_KERNELS(ESPALIER_ROW)
#undef ESPALIER_ROW
};

// A layer's heads, as far as kernels have limits.
struct AttentionHeads {
  std::int64_t heads = 1, kv_heads = 1;
  std::int64_t head_dim = 0, value_dim = 0;  // elements of a head of queries and keys, and of values
  std::int64_t window = 0;                   // 0: none
  double soft_cap = 0;                       // 0: none
};

// A backward call of a library in bfloat16: its rows over themselves, and over the rows of the path.
struct LibraryBackward {
  AttentionHeads of;
  std::int64_t rows = 0, path_rows = 0;
  bool deterministic = true;  // sums in one order
  bool adds_in_turn = false;  // cuDNN's: without a number for each pair of rows
};

struct AttentionKernelsRow {
  bool on_cpu = false;
  int capability = 0;  // ten times the compute capability that they need; 0: every GPU has them
  int and_newer = 0;   // they run on capabilities from 100 up to this one, too; 0: on none
  int tried = 0;       // by auto, where nothing was measured, the lowest first; 0: only where they were measured
  // True for a library that takes squares and rectangles (ops/attention/composed.h), on a GPU in bfloat16 alone. The
  // results of its calls come from ATen's allocator. The members that follow are of such libraries.
  bool composed = false;
  std::int64_t head_multiple = 1, largest_head = std::numeric_limits<std::int64_t>::max();
  std::int64_t largest_head_newer = largest_head;  // from capability 10.0 on
  std::int64_t fewest_rows = 1;                    // sequences are padded to these
  std::int64_t ordered_rows = 0;                   // longest side of a backward that sums in one order; 0: any
  std::int64_t (*backward_bytes)(const LibraryBackward& call) = nullptr;  // the call's gradients and workspace

  bool run_on(int gpu_capability) const;
  // Why attention with these heads runs on the own kernels, for a person ("windows"); empty: these kernels take it. On
  // a GPU of this capability; 0: any.
  std::string reason_against(const AttentionHeads& heads, int gpu_capability = 0) const;
  // Longest side of a backward; `pairs`: it sums in one order by keeping a number for each pair of rows.
  std::int64_t backward_rows(bool pairs) const;
};
// Not of `automatic`.
const AttentionKernelsRow& row_of(AttentionKernels kernels);
// The kernels that auto tries on a GPU where nothing was measured, the best first.
std::vector<AttentionKernels> tried_in_order();

// FlashAttention-2: dL/dq in float32, in one order once for each of as many splits as keep the multiprocessors busy; a
// sum for each query; where several query heads share a key head, gradients of keys and values for each of them.
std::int64_t flash_backward_bytes(const LibraryBackward& call);

// cuDNN: squares are padded to powers of two, at most three quarters of them empty (ops/cuda/cudnn_attention.cpp).
std::int64_t cudnn_backward_bytes(const LibraryBackward& call);

// The workspace of a backward graph of cuDNN. If it keeps `pairs`: the gradient of each score in bfloat16; else dL/dq
// in float32. Beside that a sum per query; gradients of keys and values for each query head. `queries` and `keys`: of
// all sequences, as padded; `pairs`: of a query and a key of one sequence.
std::int64_t cudnn_workspace_bytes(std::int64_t heads, std::int64_t head_dim, std::int64_t queries, std::int64_t keys,
                                   std::int64_t pairs, bool keeps_pairs);

}  // namespace espalier
