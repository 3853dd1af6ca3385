// The critic's loss of a mini-batch as a function of its values, and its derivative.
//
//   L = 1/2 agg(max((v - R)^2, (clip(v, V - c, V + c) - R)^2))
//
// v is the critic's value, V its value before the update (the record's `values`), R the return, c = --cliprange-value,
// agg is --loss-agg-mode. V and R are constants. Equations: docs/objectives.md (31) to (34); verl 0.9,
// compute_value_loss. Every denominator is known before the first wave, so each token adds its part independently, in
// any order.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/objective/compensated_sum.h"
#include "espalier/objective/denominator.h"
#include "espalier/options/options.h"
#include "espalier/program/step_plan.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

// Errors: InputError naming the line and --critic if a record has neither `returns` nor a reward.
void check_value_targets(std::span<const Rollout> rollouts);

// R of every response token: the record's `returns`, else values + GAE of the reward before whitening (30).
// Errors: as check_value_targets; InputError if a turn lacks `returns` and a turn of its trajectory lacks values.
std::vector<std::vector<double>> compute_value_targets(std::span<const Rollout> rollouts, const Options& options);

struct ValueTerm {
  double loss = 0;       // with its factor 1/2
  double gradient = 0;   // d loss / d value, as torch.autograd gives it: max, min of equal numbers pass half to each
  bool clipped = false;  // the clipped square is the larger one
};
ValueTerm value_term(double value, double old_value, double target, double cliprange);

struct ValueLossParts {
  double loss = 0;
  double clip_fraction = 0;  // of loss tokens
  double values_mean = 0;    // over loss tokens
  std::int64_t loss_tokens = 0;
};

// The interface between a value loss and a head: the derivative of every edge's value.
class ValueSlopes {
 public:
  virtual ~ValueSlopes() = default;
  // Overwrites dL/dvalue of the edges; may count their parts of the loss.
  virtual void add_edges(std::span<const LossEdge> edges, std::span<const double> value,
                         std::span<double> grad_value) = 0;
};

class ValueObjective : public ValueSlopes {
 public:
  // `targets`: R, one series per rollout. Both spans must outlive the object. Errors: InputError for a rollout without
  // `values`, and the errors of AggregationDivisors::from.
  ValueObjective(std::span<const Rollout> rollouts, std::span<const std::vector<double>> targets,
                 const Options& options);

  // Adds the edges' parts to parts() and overwrites dL/dvalue. A masked token gives zero and adds nothing.
  void add_edges(std::span<const LossEdge> edges, std::span<const double> value, std::span<double> grad_value) override;
  // The same for one token; returns dL/dvalue.
  double add_token(std::int32_t rollout, std::int32_t position, double value);

  ValueLossParts parts() const;  // sums so far, with the loss's weights and denominators

 private:
  std::span<const Rollout> rollouts_;
  std::span<const std::vector<double>> targets_;
  double cliprange_;
  std::vector<double> token_weight_;  // [rollouts]
  std::int64_t all_loss_tokens_;      // of the mini-batch
  CompensatedSum loss_, values_;
  std::int64_t loss_tokens_ = 0, clipped_tokens_ = 0;
};

}  // namespace espalier
