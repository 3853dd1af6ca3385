#include "espalier/mixers/states/work.h"

namespace espalier {
namespace {

constexpr Element kActivation = Element::activation, kAccumulator = Element::accumulator;

// True if any product before the output's is adapted.
bool adapts_rows(const StateMixer& mixer, const BlockShape& b) {
  const std::uint32_t rest = ~(std::uint32_t{1} << mixer.output_product());
  return (b.layer.adapted_alike.mixer & rest) != 0;
}

}  // namespace

StateMixerSaved::StateMixerSaved(const StateMixer& mixer, const BlockShape& b, const BlockRows& rows)
    : BufferList(b.bytes) {
  projected_TW = add("projected rows", rows.all, mixer.projected());
  mixed_TV = add("mixed rows", rows.all, mixer.mixed_width());
  if (const std::int64_t each = mixer.latents().each; each > 0)
    latents_TC = add("latents of gates", rows.all, 2 * each);
}

StateMixerForwardBuffers::StateMixerForwardBuffers(const StateMixer& mixer, const BlockShape& b, const BlockRows& rows,
                                                   std::int64_t output_bytes)
    : BufferList(b.bytes) {
  const std::int64_t T = rows.all, V = mixer.mixed_width();
  if (b.layer.has_norms_before()) normed_TM = add("normalised rows", T, b.shape.hidden, kActivation, Stage::projection);
  states_FN = add("states at forks", rows.states, mixer.state(), kAccumulator, Stage::rows);
  if (mixer.gates_rows()) gated_TV = add("gated rows", T, V, kActivation, Stage::output);
  if (rows.narrow) mixed_RV = add("mixed rows of outputs", rows.continuing, V, kActivation, Stage::output);
  if (adapts_rows(mixer, b)) nest(Stage::projection, low_rank_bytes(b, T));
  nest(Stage::output, output_bytes);
}

StateMixerBackwardBuffers::StateMixerBackwardBuffers(const StateMixer& mixer, const BlockShape& b,
                                                     const BlockRows& rows, Mixer::BlockBytes of_block)
    : BufferList(b.bytes) {
  const std::int64_t T = rows.all, R = rows.continuing, M = b.shape.hidden, V = mixer.mixed_width();
  const StateMixer::Latents latents = mixer.latents();
  grad_mixed_TV = add("gradient of mixed rows", T, V, kActivation, Stage::mlp, Stage::input);
  nest(Stage::mlp, of_block.mlp);
  if (mixer.gates_rows()) gated_TV = add("gated rows", T, V, kActivation, Stage::output);
  if (rows.narrow) mixed_RV = add("mixed rows of outputs", R, V, kActivation, Stage::output);
  if (rows.narrow) grad_mixed_RV = add("gradient of mixed rows of outputs", R, V, kActivation, Stage::output);
  nest(Stage::output, of_block.output);
  grad_projected_TW = add("gradient of projected rows", T, mixer.projected(), kActivation, Stage::rows, Stage::input);
  states_FN = add("states at forks", rows.states, mixer.state(), kAccumulator, Stage::rows);
  grad_states_FN = add("gradients of states at forks", rows.states, mixer.state(), kAccumulator, Stage::rows);
  normed_TM = add("normalised rows", T, M, kActivation, Stage::input);
  projected_product = add_product(*this, b, "product for projected rows",
                                  mixer.projected() - latents.gates - latents.decays, M, Stage::input);
  if (const std::int64_t C = latents.each; C > 0) {
    grad_latents_TC = add("gradient of latents of gates", T, 2 * C, kActivation, Stage::input);
    latents_product = add_product(*this, b, "product for latents of gates", 2 * C, M, Stage::input);
    gates_product = add_product(*this, b, "product for gates of values", latents.gates, C, Stage::input);
    decays_product = add_product(*this, b, "product for decays", latents.decays, C, Stage::input);
  }
  if (adapts_rows(mixer, b)) nest(Stage::input, low_rank_bytes(b, T));
}

std::int64_t StateMixer::saved_bytes(const BlockShape& block, const BlockRows& rows) const {
  return StateMixerSaved(*this, block, rows).peak();
}
std::int64_t StateMixer::forward_bytes(const BlockShape& block, const BlockRows& rows, BlockBytes of_block) const {
  return StateMixerForwardBuffers(*this, block, rows, of_block.output).peak();
}
std::int64_t StateMixer::backward_bytes(const BlockShape& block, const BlockRows& rows, BlockBytes of_block) const {
  return StateMixerBackwardBuffers(*this, block, rows, of_block).peak();
}

}  // namespace espalier
