// The critic's head in a step: one value for every row with edges, also where rollouts share the row, and the
// derivatives of the value loss.
//
// The value of response token t is that of the row before it (the last row of the prompt for t = 0), so its edges are
// the log-prob's. Source: verl 0.9, values[:, -response_length - 1 : -1].
#pragma once

#include <span>
#include <vector>

#include "espalier/execute/head.h"
#include "espalier/gradient/gradient_set.h"
#include "espalier/model/decoder.h"
#include "espalier/objective/value_loss.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

class CriticHead : public Head {
 public:
  // Without `objective` and `gradients` it runs forward only. The arguments must outlive the object.
  CriticHead(const Decoder& decoder, std::span<const Rollout> rollouts, ValueSlopes* objective = nullptr,
             GradientSet* gradients = nullptr);

  void score(const HeadWork& work) override;

  // One series per rollout, one value per response token; NaN for tokens without a requested value.
  std::vector<std::vector<double>>& values() { return values_; }

 private:
  const Decoder& decoder_;
  ValueSlopes* objective_;
  GradientSet* gradients_;
  std::vector<std::vector<double>> values_;
};

}  // namespace espalier
