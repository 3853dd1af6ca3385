#include "espalier/mixers/recurrence/work.h"

#include <algorithm>

#include "espalier/mixers/recurrence/gpu_work.h"
#include "espalier/program/step_kind.h"

namespace espalier {
namespace {

constexpr Element kActivation = Element::activation, kAccumulator = Element::accumulator;

constexpr std::int64_t kBlockRows = 64;    // kStateBlockRows of ops/cpu/delta_rule_ranges.h
constexpr std::int64_t kBlockStates = 21;  // with decays of channels: ops/cpu/channel_decay_ranges.h
constexpr int kCalls = 8;

// True if any product before the output's has an adapter.
bool adapts_rows(const Recurrence& mixer, const BlockShape& b) {
  const std::uint32_t rest = ~(std::uint32_t{1} << mixer.output_product());
  return (b.layer.adapted_alike.mixer & rest) != 0;
}

}  // namespace

RecurrenceSaved::RecurrenceSaved(const RecurrenceShape& s, const BlockShape& b, const BlockRows& rows)
    : BufferList(b.bytes) {
  projected_TW = add("projected rows", rows.all, s.projected());
  mixed_TV = add("mixed rows", rows.all, s.value_width());
  if (s.decays_channels()) gate_latents_TC = add("latents of gates", rows.all, 2 * s.gate_latent);
}

RecurrenceForwardBuffers::RecurrenceForwardBuffers(const Recurrence& mixer, const BlockShape& b, const BlockRows& rows,
                                                   std::int64_t output_bytes)
    : BufferList(b.bytes) {
  const std::int64_t T = rows.all, V = mixer.shape.value_width();
  if (b.layer.has_norms_before()) normed_TM = add("normalised rows", T, b.shape.hidden, kActivation, Stage::projection);
  states_FN = add("states at forks", rows.states, mixer.state(), kAccumulator, Stage::rows);
  gated_TV = add("gated rows", T, V, kActivation, Stage::output);
  if (rows.narrow) gated_RV = add("gated rows of outputs", rows.continuing, V, kActivation, Stage::output);
  if (adapts_rows(mixer, b)) nest(Stage::projection, low_rank_bytes(b, T));
  nest(Stage::output, output_bytes);
}

RecurrenceBackwardBuffers::RecurrenceBackwardBuffers(const Recurrence& mixer, const BlockShape& b,
                                                     const BlockRows& rows, Mixer::BlockBytes of_block)
    : BufferList(b.bytes) {
  const RecurrenceShape& s = mixer.shape;
  const std::int64_t T = rows.all, R = rows.continuing, M = b.shape.hidden, V = s.value_width();
  grad_mixed_TV = add("gradient of mixed rows", T, V, kActivation, Stage::mlp, Stage::input);
  nest(Stage::mlp, of_block.mlp);
  gated_TV = add("gated rows", T, V, kActivation, Stage::output);
  if (rows.narrow) gated_RV = add("gated rows of outputs", R, V, kActivation, Stage::output);
  if (rows.narrow) grad_gated_RV = add("gradient of gated rows of outputs", R, V, kActivation, Stage::output);
  nest(Stage::output, of_block.output);
  grad_projected_TW = add("gradient of projected rows", T, s.projected(), kActivation, Stage::rows, Stage::input);
  states_FN = add("states at forks", rows.states, s.state(), kAccumulator, Stage::rows);
  grad_states_FN = add("gradients of states at forks", rows.states, s.state(), kAccumulator, Stage::rows);
  normed_TM = add("normalised rows", T, M, kActivation, Stage::input);
  projected_product = add_product(*this, b, "product for projected rows", s.projected_from_rows(), M, Stage::input);
  if (s.decays_channels()) {
    const std::int64_t C = s.gate_latent;
    grad_gate_latents_TC = add("gradient of latents of gates", T, 2 * C, kActivation, Stage::input);
    gate_latents_product = add_product(*this, b, "product for latents of gates", 2 * C, M, Stage::input);
    gate_z_product = add_product(*this, b, "product for gates of values", V, C, Stage::input);
    gate_a_product = add_product(*this, b, "product for decays", s.decays(), C, Stage::input);
  }
  if (adapts_rows(mixer, b)) nest(Stage::input, low_rank_bytes(b, T));
}

std::int64_t Recurrence::saved_bytes(const BlockShape& block, const BlockRows& rows) const {
  return RecurrenceSaved(shape, block, rows).peak();
}
std::int64_t Recurrence::forward_bytes(const BlockShape& block, const BlockRows& rows, BlockBytes of_block) const {
  return RecurrenceForwardBuffers(*this, block, rows, of_block.output).peak();
}
std::int64_t Recurrence::backward_bytes(const BlockShape& block, const BlockRows& rows, BlockBytes of_block) const {
  return RecurrenceBackwardBuffers(*this, block, rows, of_block).peak();
}

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

GpuScratch Recurrence::gpu_scratch(const ScratchRows& rows) const {
  if (!rows.gradients) return {};
  return {recurrent_scratch_bytes(shape, rows.rows, element_bytes(rows.dtype).accumulator), 0};
}

}  // namespace espalier
