// The losses of a training service whose clients send targets, weights and old log-probs themselves: sums over targets,
// never means. Names and formulas: docs/serve.md.
//
// lp is a target's log-prob, q the log-prob given with it, A its advantage, w its weight, r = exp(lp - q), and [lo, hi]
// the bounds of the ratio, which may differ from target to target.
//   cross_entropy         -w lp
//   importance_sampling   -r A
//   ppo                   -min(r A, clip(r, lo, hi) A)
//   cispo                 -clip(r, lo, hi) lp A, the ratio held constant
//   dro                   -(lp A - beta/2 (lp - q)^2)
//   gspo                  ppo with r = exp(mean of lp - q over the mask), each target's own lp having the gradient
// A target with A = 0 adds nothing, except beta's part of dro, whatever its q is.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/objective/compensated_sum.h"
#include "espalier/objective/edge_loss.h"

namespace espalier {

enum class DatumLossKind { cross_entropy, importance_sampling, ppo, cispo, dro, gspo };

// One datum, which is one rollout. Series hold one number for each target.
struct DatumTerms {
  DatumLossKind kind = DatumLossKind::cross_entropy;
  std::vector<double> weight;                 // w, or A
  std::vector<double> old_logprob;            // q; empty for cross_entropy
  std::vector<std::uint8_t> in_mean;          // gspo: the targets of the mean
  std::vector<double> ratio_low, ratio_high;  // of each target, or one number for all
  double beta = 0;                            // dro
};

class DatumLoss final : public EdgeLoss {
 public:
  // `terms`: one for each rollout of the pass, in order. They must outlive the object.
  explicit DatumLoss(std::span<const DatumTerms> terms);

  bool needs_whole_rollout() const override { return needs_whole_rollout_; }
  void add_edges(std::span<const LossEdge> edges, std::span<const double> logprob, std::span<const double> entropy,
                 std::span<double> grad_logprob, std::span<double> grad_entropy) override;
  void add_rollout(std::int32_t rollout, std::span<const double> logprob, std::span<const double> entropy,
                   std::span<double> grad_logprob, std::span<double> grad_entropy) override;

  // The sums of one rollout, once all of its targets were added.
  double loss(std::int32_t rollout) const { return sums_[static_cast<std::size_t>(rollout)].loss.value(); }
  std::int64_t clipped(std::int32_t rollout) const { return sums_[static_cast<std::size_t>(rollout)].clipped; }

 private:
  struct Sum {
    CompensatedSum loss;
    std::int64_t clipped = 0;
  };
  double add(std::int32_t rollout, std::int32_t position, double logprob, double mean_log_ratio);

  std::span<const DatumTerms> terms_;
  std::vector<Sum> sums_;
  bool needs_whole_rollout_ = false;
};

}  // namespace espalier
