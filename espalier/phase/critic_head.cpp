#include "espalier/phase/critic_head.h"

#include <algorithm>
#include <limits>

#include "espalier/base/mutation.h"

namespace espalier {

CriticHead::CriticHead(const Decoder& decoder, std::span<const Rollout> batch, ValueObjective* objective,
                       GradientSet* gradients)
    : decoder_(decoder), objective_(objective), gradients_(gradients) {
  for (const Rollout& rollout : batch)
    values_.emplace_back(rollout.response_ids.size(), std::numeric_limits<double>::quiet_NaN());
}

void CriticHead::score(const HeadWork& work) {
  if (work.rows.edges.empty()) return;
  const ModelViews& weights = decoder_.weights();
  const ValueHeadProblem problem{work.normed_OM, weights.value_M, weights.value_bias_1};
  std::vector<double> value(work.rows.rows.output_row.size()), gradient(value.size());
  value_head_forward(problem, value);
  for (std::size_t e = 0; e < work.rows.edges.size(); ++e) {
    const LossEdge& edge = work.rows.edges[e];
    if (ESPALIER_MUTATION(value_of_the_fork_lost) && work.item.path_rows > 0 && edge.row == 0) continue;
    const std::int32_t position =
        ESPALIER_MUTATION(value_after_its_token) ? std::max(edge.position - 1, 0) : edge.position;
    const auto row = static_cast<std::size_t>(work.rows.head_edges[e].output);
    values_[static_cast<std::size_t>(edge.rollout)][static_cast<std::size_t>(position)] = value[row];
    if (!objective_) continue;
    const double slope = objective_->add_token(edge.rollout, position, value[row]);
    gradient[row] = (ESPALIER_MUTATION(value_of_one_rollout) ? 0 : gradient[row]) + slope;
  }
  if (!objective_) return;
  ModelViews& grads = gradients_->views();
  value_head_backward(problem, gradient, {work.grad_normed_OM, grads.value_M, grads.value_bias_1});
}

}  // namespace espalier
