// A loss as the language head asks for it: log-probs and entropies of edges in, their derivatives out.
#pragma once

#include <span>

#include "espalier/program/step_plan.h"

namespace espalier {

class EdgeLoss {
 public:
  virtual ~EdgeLoss() = default;

  // True if a target's derivative depends on other targets of its rollout. Then only add_rollout may be used.
  virtual bool needs_whole_rollout() const = 0;

  // Adds the edges' parts of the loss and overwrites their derivatives.
  virtual void add_edges(std::span<const LossEdge> edges, std::span<const double> logprob,
                         std::span<const double> entropy, std::span<double> grad_logprob,
                         std::span<double> grad_entropy) = 0;
  // The same for all targets of a rollout at once.
  virtual void add_rollout(std::int32_t rollout, std::span<const double> logprob, std::span<const double> entropy,
                           std::span<double> grad_logprob, std::span<double> grad_entropy) = 0;
};

}  // namespace espalier
