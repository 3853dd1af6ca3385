// The loss of a mini-batch as a function of log-probs and entropies, and its derivative.
//
//   L = agg(policy loss) - entropy_coeff * agg(entropy) + kl_loss_coef * agg(KL)
//
// Advantages and all denominators are known before the first wave, so each token (or, for sequence-level losses, each
// rollout) adds its part independently, in any order. All arithmetic is in double. Formulas: docs/objectives.md;
// meaning of the names: verl 0.9. Not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "espalier/objective/edge_loss.h"
#include "espalier/options/options.h"
#include "espalier/options/token_rules.h"
#include "espalier/program/step_plan.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

// Advantages over a whole file (or the records of one `step`), before mini-batches are formed: one per response token.
// Records without a reward beside others with one have advantage 0 and no part in their group's statistics, except
// under gae. Errors: InputError naming option and line if a needed field is missing; UnsupportedError for returns
// through the branches of a trajectory.
std::vector<std::vector<double>> compute_advantages(std::span<const Rollout> rollouts, const Options& options);

// Rollouts whose advantage is 0 because nobody judged them while others were judged.
std::int64_t count_unjudged(std::span<const Rollout> rollouts);

// A rule of token_rules.def in a step. `holds` and `mean` are sums over ranks: a rule holds if `holds` is above 0.
struct RuleReport {
  double holds = 0, mean = 0;  // mean over loss tokens of the function's number
};

struct LossParts {
  double loss = 0, pg_loss = 0, kl_loss = 0, entropy = 0;  // kl_loss and entropy before their coefficients
  double clip_fraction = 0;                                // of loss tokens
  std::int64_t loss_tokens = 0;
  std::array<RuleReport, kTokenRules> rules{};
};

struct TokenGradient {
  double logprob = 0;  // dL / d logprob
  double entropy = 0;  // dL / d entropy
};

class Objective final : public EdgeLoss {
 public:
  // `rollouts`: of one mini-batch; `advantages`: one series for each of them. Both must outlive the object.
  // Errors: InputError, naming option and line, if a field that an option needs is missing, and the errors of
  // AggregationDivisors::from.
  Objective(std::span<const Rollout> rollouts, std::span<const std::vector<double>> advantages, const Options& options);
  ~Objective() override;

  // True if a token's derivative depends on other tokens of its rollout: the policy loss (gspo, vespo), --ratio-level
  // sequence, or a rule of token_rules.def sees other tokens. Then only add_rollout may be used.
  bool needs_whole_rollout() const override;

  // True if it depends on other rollouts of its sequence instead (--loss-unit trajectory): settle_sequences comes
  // first. Then needs_whole_rollout() is false.
  bool needs_sequences() const;
  // Takes the log-probs that the policy has now, one series per rollout; log-probs of masked tokens are not read.
  void settle_sequences(std::span<const std::vector<double>> logprobs);

  // Adds the edges' parts to parts() and overwrites their derivatives. Masked tokens give zeros and add nothing.
  void add_edges(std::span<const LossEdge> edges, std::span<const double> logprob, std::span<const double> entropy,
                 std::span<double> grad_logprob, std::span<double> grad_entropy) override;
  // The same for one token; returns its derivatives.
  TokenGradient add_token(std::int32_t rollout, std::int32_t position, double logprob, double entropy);
  // The same for all response tokens of a rollout at once, in any case; overwrites grad_logprob and grad_entropy.
  void add_rollout(std::int32_t rollout, std::span<const double> logprob, std::span<const double> entropy,
                   std::span<double> grad_logprob, std::span<double> grad_entropy) override;

  // Sums so far, with the loss's weights and denominators.
  LossParts parts() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace espalier
