// Operations and scratch of recurrent rows.
#include <algorithm>

#include "espalier/device/buffers.h"
#include "espalier/mixers/recurrence/gpu_work.h"
#include "espalier/mixers/recurrence/shape.h"

namespace espalier {
namespace {

constexpr std::int64_t kBlockRows = 64;    // kStateBlockRows of ops/cpu/delta_rule_ranges.h
constexpr std::int64_t kBlockStates = 21;  // with decays of channels: ops/cpu/channel_decay_ranges.h
constexpr int kCalls = 8;

}  // namespace

// A row's FLOPs: forward row by row; backward in blocks of C rows, where the states before the blocks are made again
// (ops/cpu/delta_rule_ranges.h). A block's small products are of triangles. Mamba-2 does not read its state before it
// writes. With decays of channels the backward goes row by row, too (ops/cpu/channel_decay_ranges.h): twice a row's
// forward for the states, and 15 operations for a number of the state.
MixerFlops Recurrence::flops() const {
  const RecurrenceShape& s = shape;
  const auto dk = static_cast<double>(s.key_dim), dv = static_cast<double>(s.value_dim),
             C = static_cast<double>(kBlockRows);
  const double row = (s.mamba ? 4.0 : 6.0) * static_cast<double>(s.matrix());
  if (s.decays_channels()) return {.row = row, .row_backward = 1 + (2 * 6 + 15) / 6.0};
  const double of_states = (s.mamba ? 8 : 14) * dk * dv, of_rows = s.mamba ? 2 * dv + 2 * dk : 5 * dv + 4 * dk;
  const double blocks =
      static_cast<double>(s.value_heads) * (of_states + C * of_rows) + static_cast<double>(s.key_heads) * C * 2 * dk;
  return {.row = row, .row_backward = 1 + blocks / row};
}

// The rate of rows was measured with the convolution and the gated norm around the recurrence.
MixerTraffic Recurrence::traffic() const { return {0, kCalls}; }

std::int64_t Recurrence::widest_row() const { return shape.projected(); }

// The scratch of a key head: states at starts of blocks, and the rows of one block.
std::int64_t Recurrence::cpu_scratch(const ScratchRows& rows) const {
  const RecurrenceShape& s = shape;
  const std::int64_t of_head = s.key_dim * s.value_dim, each = s.value_heads / s.key_heads,
                     width = 2 * s.key_dim + each * s.value_dim;
  const std::int64_t of_block = s.decays_channels()
                                    ? kBlockStates * of_head + kBlockRows * 3 * s.key_dim
                                    : 2 * of_head + kBlockRows * (5 * kBlockRows + 4 * s.value_dim + s.key_dim);
  return rows.threads * element_bytes(rows.dtype).accumulator *
         ((rows.rows / kBlockRows + 3) * each * of_head + of_block + 64 * s.key_dim + 3 * s.kernel * width +
          kBlockRows * (4 * width + 4 * s.key_dim + (each + 2) * s.value_dim));
}

bool Recurrence::fits_chunks() const { return espalier::fits_chunks(shape); }

GpuScratch Recurrence::gpu_scratch(const ScratchRows& rows) const {
  return {recurrent_scratch_bytes(shape, rows.rows, rows.dtype, rows.gradients), 0};
}

}  // namespace espalier
