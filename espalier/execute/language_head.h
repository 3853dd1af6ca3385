// The language-model head in a step: log-probs and entropies of the edges, and the policy objective's derivatives.
#pragma once

#include <span>
#include <vector>

#include "espalier/device/arena.h"
#include "espalier/execute/head.h"
#include "espalier/gradient/gradient_set.h"
#include "espalier/model/decoder.h"
#include "espalier/objective/edge_loss.h"
#include "espalier/objective/fused_head.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

// Series of one rollout, one value per target.
struct RolloutSeries {
  std::vector<double> logprob, entropy;            // NaN for targets without a requested log-prob
  std::vector<double> grad_logprob, grad_entropy;  // dL/d...; kept only for sequence-level objectives
};

class LanguageHead : public Head {
 public:
  // Without `objective` and `gradients` it runs forward only. The arguments must outlive the object.
  LanguageHead(const Decoder& decoder, std::span<const Rollout> rollouts, Arena& arena, EdgeLoss* objective = nullptr,
               GradientSet* gradients = nullptr);

  bool needs_whole_rollout() const override { return objective_ && objective_->needs_whole_rollout(); }
  void score(const HeadWork& work) override;
  void finish_rollouts(const PlanItem& item) override;
  void add_backward(const HeadWork& work) override;

  std::vector<RolloutSeries>& series() { return series_; }  // one per rollout

 private:
  HeadProblem problem(const HeadWork& work) const;
  HeadGradients gradients(const HeadWork& work) const {
    return {work.grad_normed_OM, gradients_->views().head_VM, gradients_->views().head_low_rank};
  }
  void keep(std::span<const LossEdge> edges, std::span<const double> logprob, std::span<const double> entropy);
  void score_forward(const HeadWork& work);
  // Merges the scores and derivatives that other ranks of cp computed for the edges of a sharded set.
  void join_scores(const HeadWork& work);
  void join_derivatives(const HeadWork& work);
  void score_with_gradient(const HeadWork& work);
  RolloutSeries& series_of(const LossEdge& edge) { return series_[static_cast<std::size_t>(edge.rollout)]; }

  const Decoder& decoder_;
  std::span<const Rollout> rollouts_;
  Arena& arena_;
  EdgeLoss* objective_;
  GradientSet* gradients_;
  std::vector<RolloutSeries> series_;
};

}  // namespace espalier
