#include "espalier/execute/language_head.h"

#include <ATen/core/Tensor.h>

#include <limits>

namespace espalier {

LanguageHead::LanguageHead(const Decoder& decoder, std::span<const Rollout> rollouts, Arena& arena, EdgeLoss* objective,
                           GradientSet* gradients)
    : decoder_(decoder), rollouts_(rollouts), arena_(arena), objective_(objective), gradients_(gradients) {
  for (const Rollout& rollout : rollouts) {
    RolloutSeries series;
    series.logprob.assign(static_cast<std::size_t>(rollout.targets()), std::numeric_limits<double>::quiet_NaN());
    series.entropy = series.logprob;
    series_.push_back(std::move(series));
  }
}

HeadProblem LanguageHead::problem(const HeadWork& work) const {
  const VocabularyPart part{decoder_.local().vocabulary().begin, decoder_.shape().vocabulary, decoder_.mesh().tp,
                            decoder_.logits(), decoder_.weights().head_low_rank};
  return {work.normed_OM, decoder_.weights().head_VM, work.input.head_edges, part};
}

void LanguageHead::score(const HeadWork& work) {
  if (!work.input.edges.empty()) objective_ && !needs_whole_rollout() ? score_with_gradient(work) : score_forward(work);
  if (needs_whole_rollout()) join_scores(work);
}

void LanguageHead::join_scores(const HeadWork& work) {
  const std::vector<LossEdge>& edges = work.input.set_edges;
  std::vector<double> values;
  for (const LossEdge& edge : edges) {
    const RolloutSeries& series = series_of(edge);
    values.push_back(series.logprob[edge.position]);
    values.push_back(series.entropy[edge.position]);
  }
  values = values_of_any(decoder_.mesh().cp, std::move(values));
  for (std::size_t e = 0; e < edges.size(); ++e) keep({&edges[e], 1}, {&values[2 * e], 1}, {&values[2 * e + 1], 1});
}

// Each rollout's are found by one rank; the others add 0.
void LanguageHead::join_derivatives(const HeadWork& work) {
  const std::vector<LossEdge>& edges = work.input.set_edges;
  std::vector<double> values;
  for (const LossEdge& edge : edges) {
    RolloutSeries& series = series_of(edge);
    series.grad_logprob.resize(series.logprob.size());
    series.grad_entropy.resize(series.logprob.size());
    values.push_back(series.grad_logprob[edge.position]);
    values.push_back(series.grad_entropy[edge.position]);
  }
  values = sums_over_ranks(decoder_.mesh().cp, std::move(values));
  for (std::size_t e = 0; e < edges.size(); ++e) {
    series_of(edges[e]).grad_logprob[edges[e].position] = values[2 * e];
    series_of(edges[e]).grad_entropy[edges[e].position] = values[2 * e + 1];
  }
}

void LanguageHead::keep(std::span<const LossEdge> edges, std::span<const double> logprob,
                        std::span<const double> entropy) {
  for (std::size_t e = 0; e < edges.size(); ++e) {
    series_of(edges[e]).logprob[edges[e].position] = logprob[e];
    series_of(edges[e]).entropy[edges[e].position] = entropy[e];
  }
}

void LanguageHead::score_forward(const HeadWork& work) {
  const std::vector<LossEdge>& edges = work.input.edges;
  std::vector<double> logprob(edges.size()), entropy(edges.size());
  head_forward(problem(work), logprob, entropy, arena_);
  keep(edges, logprob, entropy);
}

void LanguageHead::score_with_gradient(const HeadWork& work) {
  const auto objective = [&](std::size_t first, std::span<const double> logprob, std::span<const double> entropy,
                             std::span<double> grad_logprob, std::span<double> grad_entropy) {
    const auto edges = std::span(work.input.edges).subspan(first, logprob.size());
    keep(edges, logprob, entropy);
    objective_->add_edges(edges, logprob, entropy, grad_logprob, grad_entropy);
  };
  add_head_forward_backward(problem(work), objective, gradients(work), arena_);
}

void LanguageHead::finish_rollouts(const PlanItem& item) {
  const Group& cp = decoder_.mesh().cp;
  if (is_sharded(item, cp.size()) && cp.rank() != 0) return;  // every rank knows their log-probs, one counts them
  for (const std::int32_t rollout : item.finished) {
    RolloutSeries& series = series_[static_cast<std::size_t>(rollout)];
    series.grad_logprob.resize(series.logprob.size());
    series.grad_entropy.resize(series.logprob.size());
    objective_->add_rollout(rollout, series.logprob, series.entropy, series.grad_logprob, series.grad_entropy);
  }
}

void LanguageHead::add_backward(const HeadWork& work) {
  join_derivatives(work);
  if (work.input.edges.empty()) return;
  std::vector<double> grad_logprob, grad_entropy;
  for (const LossEdge& edge : work.input.edges) {
    grad_logprob.push_back(series_of(edge).grad_logprob.at(static_cast<std::size_t>(edge.position)));
    grad_entropy.push_back(series_of(edge).grad_entropy.at(static_cast<std::size_t>(edge.position)));
  }
  add_head_backward(problem(work), grad_logprob, grad_entropy, gradients(work), arena_);
}

}  // namespace espalier
