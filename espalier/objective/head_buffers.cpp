#include "espalier/objective/head_buffers.h"

#include <algorithm>

namespace espalier {
namespace {

constexpr std::int64_t kHeadBlockRows = 256;
constexpr std::int64_t kHeadBlockBytes = std::int64_t{64} << 20;  // of logits
// Where products write sums: a GPU's, which wants some thousand rows and has the memory.
constexpr std::int64_t kLargeHeadBlockRows = 4096;
constexpr std::int64_t kLargeHeadBlockBytes = std::int64_t{512} << 20;
constexpr std::int64_t kHeadWidenedBytes = std::int64_t{16} << 20;  // of weights held in the accumulator's type at once

constexpr Element kActivation = Element::activation, kAccumulator = Element::accumulator;

std::int64_t head_block_rows(std::int64_t outputs, std::int64_t row_bytes, HeadWay way) {
  const std::int64_t bytes = way.writes_sums ? kLargeHeadBlockBytes : kHeadBlockBytes;
  const std::int64_t rows = way.writes_sums ? kLargeHeadBlockRows : kHeadBlockRows;
  return std::min(outputs, std::clamp<std::int64_t>(bytes / row_bytes, 1, rows));
}

}  // namespace

HeadBuffers::HeadBuffers(ElementBytes bytes, std::int64_t outputs, std::int64_t vocabulary, std::int64_t width,
                         bool with_gradients, HeadWay way)
    : BufferList(bytes),
      block_rows(head_block_rows(outputs, vocabulary * bytes.accumulator, way)),
      vocabulary_run(vocabulary) {
  if (outputs == 0) return;
  const std::size_t blocks = with_gradients && way.ahead && outputs > block_rows ? 2 : 1;
  for (std::size_t i = 0; i < blocks; ++i) rooms[i].logits_BV = add("logits", block_rows, vocabulary, kAccumulator);
  if (way.rank > 0) {
    low_rank_Br = add("hidden rows of low rank", block_rows, way.rank, kAccumulator);
    if (bytes.activation != bytes.accumulator) {
      low_rank_hidden_BM = add("widened hidden rows for the low rank", block_rows, width, kAccumulator);
      low_rank_a_rM = add("widened A", way.rank, width, kAccumulator);
      low_rank_b_Vr = add("widened B", vocabulary, way.rank, kAccumulator);
    }
  }
  if (bytes.activation == bytes.accumulator || (way.writes_sums && !with_gradients)) return;
  if (way.writes_sums) {
    grad_logits_BV = add("narrowed gradient of logits", block_rows, vocabulary, kActivation);
    grad_hidden_BM = add("gradient of hidden rows", block_rows, width, kAccumulator);
    return;
  }
  vocabulary_run = std::min(vocabulary, std::max<std::int64_t>(1, kHeadWidenedBytes / (width * bytes.accumulator)));
  weight_run_NM = add("widened weights", vocabulary_run, width, kAccumulator);
  for (std::size_t i = 0; i < blocks; ++i)
    rooms[i].hidden_BM = add("widened hidden rows", block_rows, width, kAccumulator);
  if (with_gradients) grad_hidden_BM = add("gradient of hidden rows", block_rows, width, kAccumulator);
}

}  // namespace espalier
