#include "espalier/mixers/recurrence/gpu_work.h"

#include <algorithm>

#include "espalier/device/buffers.h"

namespace espalier {

namespace {

constexpr std::int64_t kRows = 64, kRunsAtOnce = 16, kGroupRows = 16;
constexpr std::int64_t kArrays = 40;  // of a key head, at most; each may be padded by a number

// Numbers of a key head's block of rows, without the states before blocks (Room of ops/cuda/delta_rule_backward.cu).
std::int64_t room_numbers(const RecurrenceShape& s) {
  const std::int64_t dk = s.key_dim, dv = s.value_dim, each = s.value_heads / s.key_heads;
  const std::int64_t width = 2 * dk + each * dv, decays = s.decays_channels() ? dk : 1;
  const std::int64_t convolved = 2 * (kRows + s.kernel - 1) * width + kRows * width;
  const std::int64_t of_rows = kRows * ((5 + each) * dv + 5 * dk + each * (decays + 1) + 2 * decays + 8);
  const std::int64_t of_pairs = s.decays_channels() ? (kRows / kGroupRows + kGroupRows) * dk * dv : 5 * kRows * kRows;
  return each * dk * dv + convolved + of_rows + of_pairs + kArrays;
}

// ops/cuda/delta_chunks.h.
constexpr std::int64_t kMostKeys = 128, kMostValues = 256, kValueBlock = 32, kMostPassBytes = std::int64_t{2} << 30;
// Bytes of tiles for a number of chunks. Fewer chunks leave room for more heads.
std::int64_t tile_bytes(const RecurrenceShape& s, std::int64_t chunks, bool gradients) {
  const std::int64_t width = s.key_dim <= 64 ? 64 : kMostKeys, each = s.value_heads / s.key_heads;
  const std::int64_t values = (s.value_dim + kValueBlock - 1) / kValueBlock * kValueBlock;
  const std::int64_t half = kRows * (width + values) + width * values;  // of a backward: states, and their gradients
  std::int64_t of_value_head = gradients ? 2 * half + 6 * kRows : half + 4 * kRows;
  if (s.decays_channels())  // decays and their product, gamma K, gamma Q, w K, and two matrices of pairs of rows
    of_value_head += 4 * kRows * width + width + 2 * kRows * kRows - (gradients ? kRows : 0);
  const std::int64_t of_head = 4 * chunks * (2 * kRows * width + each * of_value_head);
  return std::max(of_head, std::min(s.key_heads * of_head, kMostPassBytes));
}

// The most runs of a launch, and the most chunks of such runs.
std::int64_t runs_of(std::int64_t rows) { return std::min(kRunsAtOnce, rows); }
std::int64_t chunks_of(std::int64_t rows) { return runs_of(rows) + (rows - runs_of(rows)) / kRows; }

}  // namespace

bool fits_chunks(const RecurrenceShape& s) { return s.key_dim <= kMostKeys && s.value_dim <= kMostValues; }

std::int64_t chunk_scratch_bytes(const RecurrenceShape& s, std::int64_t rows, bool gradients) {
  const std::int64_t sums = s.channels() * (s.kernel + 1) + 2 * s.value_heads + s.decays();
  const std::int64_t of_sums = chunks_of(rows) * sums + runs_of(rows) * s.state();
  return tile_bytes(s, chunks_of(rows), gradients) + (gradients ? 4 * of_sums : 0);
}

std::int64_t row_scratch_bytes(const RecurrenceShape& s, std::int64_t rows, DType dtype, bool gradients) {
  if (!gradients) return 0;
  const std::int64_t sums = s.channels() * (s.kernel + 1) + 2 * s.decays() + s.value_heads;
  const std::int64_t of_run = s.key_heads * room_numbers(s) + sums + s.state();
  return (runs_of(rows) * of_run + chunks_of(rows) * s.matrix()) * element_bytes(dtype).accumulator;
}

std::int64_t recurrent_scratch_bytes(const RecurrenceShape& s, std::int64_t rows, DType dtype, bool gradients) {
  const std::int64_t by_rows = row_scratch_bytes(s, rows, dtype, gradients);
  const bool in_chunks = dtype == DType::bfloat16 && fits_chunks(s);
  return in_chunks ? std::max(by_rows, chunk_scratch_bytes(s, rows, gradients)) : by_rows;
}

}  // namespace espalier
