// Buffers of a mixer whose rows pass a state on (device/buffers.h).
//
// T rows, R rows that continue, F states that are used within the set, N numbers of a state, W columns of a projected
// row, V channels of a mixed row, C channels of both latents, M width.
#pragma once

#include "espalier/mixers/states/shape.h"
#include "espalier/model/block_buffers.h"

namespace espalier {

struct StateMixerSaved : BufferList {
  StateMixerSaved(const StateMixer& mixer, const BlockShape& block, const BlockRows& rows);
  Place projected_TW, mixed_TV;
  Place latents_TC;  // where there are such
};

struct StateMixerForwardBuffers : BufferList {
  enum class Stage { projection, rows, output };
  StateMixerForwardBuffers(const StateMixer& mixer, const BlockShape& block, const BlockRows& rows,
                           std::int64_t output_bytes);
  Place normed_TM, states_FN;
  Place gated_TV;  // where mixed rows are gated
  Place mixed_RV;  // where the block is narrow
};

struct StateMixerBackwardBuffers : BufferList {
  enum class Stage { mlp, output, rows, input };
  StateMixerBackwardBuffers(const StateMixer& mixer, const BlockShape& block, const BlockRows& rows,
                            Mixer::BlockBytes of_block);
  Place grad_mixed_TV;
  Place gated_TV;                 // where mixed rows are gated
  Place mixed_RV, grad_mixed_RV;  // where the block is narrow
  Place grad_projected_TW, states_FN, grad_states_FN;
  Place normed_TM, projected_product;
  Place grad_latents_TC, latents_product, gates_product, decays_product;  // where there are latents
};

}  // namespace espalier
