// Buffers of a recurrent mixer (device/buffers.h).
//
// T rows, R rows that continue, F states that are used within the set, N numbers of a state, W columns of a projected
// row, V value channels, M width.
#pragma once

#include "espalier/mixers/recurrence/shape.h"
#include "espalier/model/block_buffers.h"

namespace espalier {

struct RecurrenceSaved : BufferList {
  RecurrenceSaved(const RecurrenceShape& shape, const BlockShape& block, const BlockRows& rows);
  Place projected_TW, mixed_TV;
  Place gate_latents_TC;  // the latents of z and a, side by side, where there are such
};

struct RecurrenceForwardBuffers : BufferList {
  enum class Stage { projection, rows, output };
  RecurrenceForwardBuffers(const Recurrence& mixer, const BlockShape& block, const BlockRows& rows,
                           std::int64_t output_bytes);
  Place normed_TM, states_FN, gated_TV;
  Place gated_RV;  // where the block is narrow
};

struct RecurrenceBackwardBuffers : BufferList {
  enum class Stage { mlp, output, rows, input };
  RecurrenceBackwardBuffers(const Recurrence& mixer, const BlockShape& block, const BlockRows& rows,
                            Mixer::BlockBytes of_block);
  Place grad_mixed_TV, gated_TV;
  Place gated_RV, grad_gated_RV;  // where the block is narrow
  Place grad_projected_TW, states_FN, grad_states_FN;
  Place normed_TM, projected_product;
  Place grad_gate_latents_TC, gate_latents_product, gate_z_product, gate_a_product;  // where there are such latents
};

}  // namespace espalier
