// Requests of clients to a model, and the answers, as plain numbers: the front writes them, the engine's side reads
// them.
//
// N tokens of a datum, K targets of a row.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace espalier::serve {

// The part of a base model that a client trains.
struct TunedPart {
  std::int64_t rank = 32;
  std::uint64_t seed = 0;
  bool attention = true, mlp = true, head = true;

  bool operator==(const TunedPart&) const = default;
};

// The losses: docs/serve.md has their formulas.
enum class LossName { cross_entropy, importance_sampling, ppo, cispo, dro, gspo };

// Row i predicts targets [i K, (i + 1) K), which may differ from token i + 1. Series have one number for each target.
struct TrainingDatum {
  std::vector<std::int32_t> tokens;   // [N]
  std::vector<std::int32_t> targets;  // [N, K]
  std::int32_t columns = 1;           // K
  bool is_wide = false;               // sent as [N, K], and answered so
  std::vector<float> weight;          // w of cross_entropy, else advantages
  std::vector<float> old_logprob;     // empty for cross_entropy
  std::vector<float> in_mean;         // gspo: not 0 where the target counts in the mean
  std::vector<float> low, high;       // bounds of the ratio; empty: the call's
};

struct TrainingCall {
  LossName loss = LossName::cross_entropy;
  double low = 0.8, high = 1.2, beta = 0.05;
  bool backward = true;
  std::vector<TrainingDatum> data;
};

struct TrainingAnswer {
  std::vector<std::vector<float>> logprobs;  // of each datum's targets
  std::map<std::string, double> metrics;     // "name:reduction"
};

struct AdamParams {
  double learning_rate = 1e-4, beta1 = 0.9, beta2 = 0.95, eps = 1e-12, weight_decay = 0, grad_clip_norm = 0;
};

}  // namespace espalier::serve
