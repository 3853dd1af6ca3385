#include "espalier/mixers/attention/library_work.h"

#include <algorithm>

#include "espalier/device/buffers.h"
#include "espalier/mixers/attention/shape.h"
#include "espalier/mixers/attention/wide_work.h"
#include "espalier/program/step_kind.h"

namespace espalier {

std::int64_t own_attention_bytes(const AttentionHeads& heads, const ScratchRows& of) {
  constexpr std::int64_t kTile = 64, kNumber = 4;
  const std::int64_t width = heads.heads * heads.head_dim;
  if (const std::int64_t widest = std::max(heads.head_dim, heads.value_dim); widest > kLargestGpuHead) {
    const ElementBytes bytes = element_bytes(of.dtype);
    const WideRoom room = WideRoom::of(bytes, of.rows, of.path_rows, of.rows, widest, of.gradients);
    return room.bytes() + arena_bytes(of.rows * heads.heads * bytes.accumulator);
  }
  const bool in_tiles = of.device.attention == AttentionKernels::hopper && of.dtype == DType::bfloat16;
  if (!in_tiles) return arena_bytes(of.rows * width * kNumber);
  const std::int64_t tiles = (of.rows + kTile - 1) / kTile, padded = tiles * kTile;
  return arena_bytes((padded * (width + 2 * heads.heads) + of.rows * heads.heads + tiles * heads.heads) * kNumber);
}

std::int64_t library_attention_bytes(const AttentionHeads& heads, const ScratchRows& of) {
  const AttentionKernelsRow& library = row_of(of.device.attention);
  if (!library.composed || of.dtype != DType::bfloat16 || of.rows == 0 || !library.reason_against(heads).empty())
    return 0;
  constexpr std::int64_t kElement = 2, kSum = 4;  // bfloat16, and what it is summed in
  const std::int64_t width = heads.heads * heads.head_dim;
  const std::int64_t sums = of.rows * width * kSum, lse = of.rows * heads.heads * kSum;
  std::int64_t most = 2 * of.rows * width * kElement + sums + 2 * lse;
  const std::int64_t keys = of.rows * heads.kv_heads * heads.head_dim * 2 * kElement;
  if (of.gradients)
    most = std::max(most, sums + lse + keys +
                              library.backward_bytes({.of = heads,
                                                      .rows = of.rows,
                                                      .path_rows = of.path_rows,
                                                      .deterministic = of.device.deterministic,
                                                      .adds_in_turn = of.device.adds_in_turn}));
  return most + kAllocatorBytes;
}

}  // namespace espalier
