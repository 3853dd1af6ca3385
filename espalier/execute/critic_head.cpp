#include "espalier/execute/critic_head.h"

#include <limits>

#include "espalier/device/host_values.h"
#include "espalier/ops/operations.h"

namespace espalier {

CriticHead::CriticHead(const Decoder& decoder, std::span<const Rollout> rollouts, ValueSlopes* objective,
                       GradientSet* gradients)
    : decoder_(decoder), objective_(objective), gradients_(gradients) {
  for (const Rollout& rollout : rollouts)
    values_.emplace_back(rollout.response_ids.size(), std::numeric_limits<double>::quiet_NaN());
}

void CriticHead::score(const HeadWork& work) {
  const std::vector<LossEdge>& edges = work.input.edges;
  if (edges.empty()) return;
  const ModelViews& weights = decoder_.weights();
  Device& device = decoder_.device();
  const at::Tensor value_O = device.allocate({work.input.model.outputs()}, at::kDouble);
  device.operations().value(work.normed_OM, weights.value_M, weights.value_bias_1, value_O);
  const at::Tensor on_host = device.to_host(value_O);
  const auto value = host_values<const double>(on_host);

  std::vector<double> of_edge;
  for (std::size_t e = 0; e < edges.size(); ++e) {
    of_edge.push_back(value[static_cast<std::size_t>(work.input.output[e])]);
    values_[static_cast<std::size_t>(edges[e].rollout)][static_cast<std::size_t>(edges[e].position)] = of_edge.back();
  }
  if (!objective_) return;
  std::vector<double> slope(edges.size()), gradient(value.size());
  objective_->add_edges(edges, of_edge, slope);
  for (std::size_t e = 0; e < edges.size(); ++e) gradient[static_cast<std::size_t>(work.input.output[e])] += slope[e];
  ModelViews& grads = gradients_->views();
  at::Tensor bias = grads.value_bias_1;
  if (!bias.defined()) bias = device.allocate({1}, grads.value_M.scalar_type());  // does not train: nobody reads it
  device.operations().add_value_backward(work.normed_OM, weights.value_M, device.upload(std::move(gradient)),
                                         work.grad_normed_OM, grads.value_M, bias);
}

}  // namespace espalier
