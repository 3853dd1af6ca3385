#include "tests/mutation/faults.h"

#include <utility>

#include "espalier/base/mutation.h"

namespace espalier::testing {
namespace {

constexpr bool kNotRecorded = false;  // verify's rollouts have no recorded experts
constexpr bool kDenseToo = false;     // the dense step has the fault as well: only an outside reference can tell
constexpr bool kOnce = true;

const Fault* on = nullptr;
int times_reached = 0;
bool once_done = false;

}  // namespace

const std::vector<Fault>& all_faults() {
  static const std::vector<Fault> faults = {
      // What a plan says.
      {"fork_token_dropped", "the repeated last prompt token of a wave has no loss edges"},
      {"boundary_edge_doubled", "its first edge stands twice"},
      {"multiplicity_of_edges_ignored", "rollouts that share a row and its next token count as one"},
      {"finished_too_early", "a sequence loss is taken when its rollout's last token is not yet known"},
      // What rows see.
      {"positions_restarted", "positions of a wave start at 0, not at the path's length"},
      {"mask_leak", "a sibling's first row sees the row before it"},
      {"path_cut_short", "rows do not see the last row of the path"},
      {"gqa_head_mixup", "query head h reads key/value head h mod J", kDenseToo},
      {"temperature_ignored", "logits are not divided by the temperature", kDenseToo},
      // Gradients that cross from waves to trunks.
      {"wave_gradient_lost", "one layer of one wave adds its part to a copy of the path's gradients", true, kOnce},
      {"accumulators_in_bf16", "the path's gradients are rounded to bfloat16 after each contribution"},
      {"path_gradients_not_zeroed", "a trunk starts from the gradients of the one before it"},
      {"unmerged_lse", "attention's backward reads a log-sum-exp that leaves keys out (1 % of the sum)"},
      {"contribution_uncounted", "one contribution arrives without being counted", true, kOnce},
      {"contributions_read_early", "a trunk's backward runs before its waves"},
      {"contributions_read_early", "the same with the path's own count switched off", true, false, "count_ignored"},
      // Gradients of parameters.
      {"recompute_with_stale_input", "a recomputed block starts from the first block's input"},
      {"last_layer_rows_forgotten", "the last block's keys and values of a trunk without outputs get no gradient"},
      {"last_layer_residual_lost", "the last block's input gets no gradient around the block", kDenseToo},
      {"norm_weight_gradient_forgotten", "the weights of the blocks' norms get no gradient", kDenseToo},
      {"tied_head_gradient_overwritten", "a wave's head gradient replaces what others have added"},
      {"embedding_repeat_lost", "of a token that occurs twice in a set of rows one gradient is kept"},
      {"gradients_not_zeroed", "a step starts from the gradient of the step before it"},
      // Routers.
      {"top_k_tie_flip", "of experts with the same probability the higher one is taken", kDenseToo},
      {"router_multiplicity_ignored", "a shared token counts once in the z-loss"},
      {"router_scope_denominator", "a rollout's auxiliary loss is averaged over its row's rollouts"},
      {"recompute_counts_again", "a recomputed trunk counts its routes a second time"},
      {"recorded_route_ignored", "recorded experts are not the ones chosen", kDenseToo},
      {"routes_not_compared", "a prefix goes on where recorded experts differ", kNotRecorded},
      // The objective.
      {"per_wave_denominator", "the loss is averaged over a wave's rollouts, not over the mini-batch's"},
      {"kl_sign", "the KL penalty's log-ratio has the wrong sign", kDenseToo},
      {"advantages_from_minibatch", "rewards are whitened over a mini-batch, not over the file", kDenseToo},
      // The critic.
      {"value_after_its_token", "a token's value is that of its own row, not of the row before it", kDenseToo},
      {"value_of_the_fork_lost", "the repeated last prompt token of a wave gives no values"},
      {"value_of_one_rollout", "of the rollouts that share a value one moves it"},
      {"value_clip_ignored", "values may move as far as they like", kDenseToo},
      {"returns_not_detached", "the return moves with the value, so that the advantage alone is left", kDenseToo},
      // The optimizer and its continuation.
      {"clip_factor_ignored", "the gradient's norm is not clipped", kDenseToo},
      {"bias_correction_off_by_one", "bias corrections are those of the next step", kDenseToo},
      {"decay_of_everything", "--decay-matrices-only decays norms and biases as well", kDenseToo},
      {"stale_step_after_resume", "the optimizer's step starts from 0 again", kDenseToo},
      {"moments_swapped_after_resume", "the first moments are read as the second and the other way round", kDenseToo},
      {"masters_rounded_after_resume", "masters are read from the bfloat16 weights", kDenseToo},
      {"position_lost_after_resume", "the data starts at its beginning again", kDenseToo},
  };
  return faults;
}

SwitchedOn::SwitchedOn(const Fault& fault) { on = &fault, times_reached = 0; }
SwitchedOn::~SwitchedOn() { on = nullptr; }
void SwitchedOn::begin_check() { once_done = false; }
int SwitchedOn::times() const { return times_reached; }

}  // namespace espalier::testing

namespace espalier::mutation {

bool active(const char* name) {
  using namespace espalier::testing;
  if (!on) return false;
  if (on->together_with == name) return true;
  if (on->name != name) return false;
  ++times_reached;
  const bool again = std::exchange(once_done, true);
  return !on->once || !again;
}

}  // namespace espalier::mutation
