#include "espalier/phase/item_run.h"

#include <ATen/ATen.h>

#include "espalier/base/mutation.h"

namespace espalier {
namespace {

Keep what_to_keep(const StepRun& step, const PlanItem& item) {
  if (!step.trains()) return Keep::nothing;
  return item.kind == ItemKind::trunk && item.state == TrunkState::recompute ? Keep::streams : Keep::everything;
}

}  // namespace

ItemRun::ItemRun(StepRun& step, const PlanItem& item)
    : step_(step), item_(item), rows_(make_item_rows(item, step.batch, step.all_logprobs, step.accounting)) {
  (item.kind == ItemKind::trunk ? step.trunk_rows : step.wave_rows) += rows_.rows.rows();
}

HeadProblem ItemRun::head_problem() const {
  return {saved_.normed_OM, step_.decoder.weights().head_VM, rows_.temperature, rows_.head_edges};
}

void ItemRun::forward() {
  if (step_.trains())
    grad_normed_OM_ = step_.arena.take({rows_.rows.outputs(), step_.decoder.shape().hidden}, step_.decoder.dtype());
  saved_ = step_.decoder.forward(rows_.rows, step_.path, what_to_keep(step_, item_), step_.arena, step_.timer);
  if (step_.counts_only) return;
  const TimedPart timed(step_.timer, part::kHead);
  if (step_.trains() && !step_.objective->needs_whole_rollout())
    score_with_gradient();
  else
    score();
  if (step_.trains() && step_.objective->needs_whole_rollout()) finish_rollouts();
}

void ItemRun::score() {
  if (rows_.edges.empty()) return;
  std::vector<double> logprob(rows_.edges.size()), entropy(rows_.edges.size());
  head_forward(head_problem(), logprob, entropy, step_.arena);
  for (std::size_t e = 0; e < rows_.edges.size(); ++e) {
    series_of(rows_.edges[e]).logprob[rows_.edges[e].position] = logprob[e];
    series_of(rows_.edges[e]).entropy[rows_.edges[e].position] = entropy[e];
  }
}

void ItemRun::score_with_gradient() {
  if (rows_.edges.empty()) return;
  std::vector<double> logprob(rows_.edges.size()), entropy(rows_.edges.size());
  const auto gradient = [&](std::int64_t e, double lp, double h) -> HeadEdgeGradient {
    const LossEdge& edge = rows_.edges[static_cast<std::size_t>(e)];
    series_of(edge).logprob[edge.position] = lp;
    series_of(edge).entropy[edge.position] = h;
    const TokenGradient token = step_.objective->add_token(edge.rollout, edge.position, lp, h);
    if (ESPALIER_MUTATION(per_wave_denominator))
      return {token.logprob * step_.batch.size() / item_.set.rollouts.size(), token.entropy};
    return {token.logprob, token.entropy};
  };
  if (ESPALIER_MUTATION(tied_head_gradient_overwritten)) step_.gradients->views().head_VM.zero_();
  head_forward_backward(head_problem(), gradient, logprob, entropy, {grad_normed_OM_, step_.gradients->views().head_VM},
                        step_.arena);
}

void ItemRun::finish_rollouts() {
  for (const std::int32_t rollout : item_.finished) {
    RolloutSeries& series = step_.series[static_cast<std::size_t>(rollout)];
    series.grad_logprob.resize(series.logprob.size());
    series.grad_entropy.resize(series.logprob.size());
    step_.objective->add_rollout(rollout, series.logprob, series.entropy, series.grad_logprob, series.grad_entropy);
  }
}

void ItemRun::backward() {
  if (step_.objective->needs_whole_rollout() && !rows_.edges.empty()) {
    const TimedPart timed(step_.timer, part::kHead);
    std::vector<double> grad_logprob, grad_entropy;
    for (const LossEdge& edge : rows_.edges) {
      grad_logprob.push_back(series_of(edge).grad_logprob.at(static_cast<std::size_t>(edge.position)));
      grad_entropy.push_back(series_of(edge).grad_entropy.at(static_cast<std::size_t>(edge.position)));
    }
    head_backward(head_problem(), grad_logprob, grad_entropy, {grad_normed_OM_, step_.gradients->views().head_VM},
                  step_.arena);
  }
  step_.decoder.backward(rows_.rows, step_.path, saved_, grad_normed_OM_, step_.gradients->views(), step_.arena,
                         step_.timer);
}

}  // namespace espalier
