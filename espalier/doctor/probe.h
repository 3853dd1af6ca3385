// Replays rollouts with a model and keeps what the faults of log-probs are told from.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "espalier/forecast/cost_model.h"
#include "espalier/metrics/progress.h"
#include "espalier/options/options.h"
#include "espalier/rollout/rollout.h"
#include "espalier/state/model_state.h"

namespace espalier {

// A response token under the model, at the rollout's temperature.
struct TokenProbe {
  double logprob = 0;       // over the token's kept set where the rollout has one
  double full_logprob = 0;  // over the whole vocabulary
  double unscaled = 0;      // the same at temperature 1
  double greatest = 0;      // of the most likely token
  std::vector<float> top;   // log-probs of the most likely tokens, descending
  std::vector<float> at;    // full_logprob at the temperatures of the wish
};

struct ProbeWish {
  std::int64_t top = 0;              // entries of TokenProbe::top
  std::vector<double> temperatures;  // of TokenProbe::at
};

// One list per rollout, one entry per response token. The model's rotary tables must cover the rollouts.
using Probe = std::vector<std::vector<TokenProbe>>;
Probe probe(const ModelState& model, std::span<const Rollout> rollouts, const ProbeWish& wish, const Options& options,
            const MachineProfile& machine, Progress& progress);

}  // namespace espalier
