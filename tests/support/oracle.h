// The slow, plain answer: one rollout at a time through a forward written with ATen operators, losses written with
// ATen operators, torch autograd for the gradient. Shares no code with the engine but the parameter table's layout.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "espalier/model/parameters.h"
#include "espalier/options/options.h"
#include "espalier/rollout/rollout.h"

namespace espalier::testing {

struct OracleResult {
  double loss = 0;                                       // with the router losses
  double aux_loss = 0, z_loss = 0;                       // before their coefficients
  at::Tensor gradient;                                   // flat, in the table's layout, dtype of the weights
  std::vector<std::vector<double>> logprobs, entropies;  // of a policy
  std::vector<std::vector<double>> values;               // of a critic
  std::vector<std::vector<std::int64_t>>
      load;  // tokens of all rollouts that each expert got, by layer; router losses only
};

// Mixes the rows of layers that carry a state, in place of the gated delta rule: o [T, V] from the q, k and v that
// the T rows of one rollout are projected to. Null: the rule itself.
using Recurrence = at::Tensor (*)(const at::Tensor& q_TK, const at::Tensor& k_TK, const at::Tensor& v_TV);
void replace_delta_rule(Recurrence recurrence);

// The experts that every token of the rollout is routed to, its last one included; recorded ones where it has some.
RecordedExperts routes_of(const ModelShape& shape, const ParameterTable& table, const at::Tensor& weights,
                          const Rollout& rollout);

// `weights`: flat, float64 or float32. The whole batch is one mini-batch.
OracleResult oracle(const ModelShape& shape, const ParameterTable& table, const at::Tensor& weights,
                    std::span<const Rollout> batch, std::span<const std::vector<double>> advantages,
                    const Options& options);

// The same of a critic, whose table has a value head. `targets`: of its values, one series per rollout.
OracleResult value_oracle(const ModelShape& shape, const ParameterTable& table, const at::Tensor& weights,
                          std::span<const Rollout> batch, std::span<const std::vector<double>> targets,
                          const Options& options);

}  // namespace espalier::testing
