#include "espalier/mixers/recurrence/gpu_work.h"

#include <algorithm>

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

}  // namespace

std::int64_t recurrent_scratch_bytes(const RecurrenceShape& s, std::int64_t rows, std::int64_t number_bytes) {
  const std::int64_t runs = std::min(kRunsAtOnce, rows);
  const std::int64_t sums = s.channels() * (s.kernel + 1) + 2 * s.decays() + s.value_heads;
  const std::int64_t of_run = s.key_heads * room_numbers(s) + sums + s.state();
  return (runs * of_run + (rows / kRows + runs) * s.matrix()) * number_bytes;
}

}  // namespace espalier
