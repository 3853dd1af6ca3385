#include "espalier/options/nearest_option.h"

#include <algorithm>
#include <map>

namespace espalier {
namespace {

// Edit distance with swaps of neighbours, by rows of the usual table: d(i, j) over prefixes of lengths i and j.
std::size_t edits_between(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before_last, last(b.size() + 1), row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) last[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        row[j] = std::min(row[j], before_last[j - 2] + 1);
    }
    before_last = last;
    last = row;
  }
  return last[b.size()];
}

// An option, and what Hugging Face's trainers, verl, OpenRLHF, NeMo-RL, slime and Megatron call it.
const std::map<std::string, std::vector<std::string>>& names_elsewhere() {
  static const std::map<std::string, std::vector<std::string>> names = {
      {"model", {"model-path", "model-dir", "model-name", "model-name-or-path", "actor-model", "pretrain"}},
      {"rollouts", {"data", "data-path", "dataset", "train-file", "train-files", "input", "input-file"}},
      {"out", {"output", "output-dir", "output-path", "save", "save-dir", "save-path"}},
      {"resume", {"resume-from", "resume-from-checkpoint", "load", "load-checkpoint"}},
      {"threads", {"num-threads", "nthreads"}},
      {"dtype", {"precision", "torch-dtype", "mixed-precision"}},
      {"seed", {"random-seed"}},
      {"mini-batch-size", {"batch-size", "global-batch-size", "ppo-mini-batch-size", "per-device-train-batch-size"}},
      {"epochs", {"num-epochs", "num-train-epochs", "total-epochs", "max-epochs", "ppo-epochs"}},
      {"steps", {"max-steps", "num-steps", "total-steps", "train-iters", "total-training-steps"}},
      {"token-budget", {"micro-batch-size", "max-tokens-per-gpu", "ppo-max-token-len-per-gpu"}},
      {"memory-budget", {"max-memory", "memory-limit"}},
      {"trunk-state", {"gradient-checkpointing", "activation-checkpointing", "recompute-granularity"}},
      {"adv-estimator", {"advantage-estimator", "advantage"}},
      {"policy-loss", {"policy-loss-fn", "loss-mode"}},
      {"clip-ratio-low", {"clip-ratio", "clip-range", "cliprange", "clip-eps", "eps-clip", "ratio-clip-min"}},
      {"clip-ratio-high", {"eps-clip-high", "ratio-clip-max"}},
      {"clip-ratio-c", {"dual-clip", "ratio-clip-c"}},
      {"loss-agg-mode", {"loss-aggregation", "loss-reduction"}},
      {"kl-loss-coef", {"kl-coef", "kl-coeff", "init-kl-coef", "kl-beta", "reference-policy-kl-penalty"}},
      {"kl-loss-type", {"kl-type", "kl-penalty", "kl-estimator"}},
      {"entropy-coeff", {"entropy-coef", "entropy-loss-coef", "entropy-coefficient"}},
      {"router-aux-loss-coef", {"aux-loss-coef", "aux-loss-coeff", "moe-aux-loss-coeff"}},
      {"router-z-loss-coef", {"z-loss-coef", "moe-z-loss-coeff"}},
      {"gamma", {"discount", "discount-factor"}},
      {"lam", {"lambda", "gae-lambda", "lambd"}},
      {"critic", {"critic-model", "value-model"}},
      {"cliprange-value", {"value-clip", "clip-value"}},
      {"critic-lr", {"critic-learning-rate"}},
      {"lr", {"learning-rate", "actor-lr", "actor-learning-rate"}},
      {"betas", {"adam-betas", "adam-beta1", "adam-beta2"}},
      {"eps", {"adam-eps", "adam-epsilon"}},
      {"weight-decay", {"wd", "l2"}},
      {"max-grad-norm", {"max-norm", "grad-clip", "clip-grad", "gradient-clipping"}},
      {"warmup-steps", {"lr-warmup-steps", "num-warmup-steps", "lr-warmup-iters"}},
      {"lr-scheduler-type", {"lr-scheduler", "lr-schedule", "lr-decay-style", "warmup-style", "lr-warmup-style"}},
      {"lr-min-ratio", {"min-lr-ratio", "min-lr-rate"}},
      {"lr-total-steps", {"total-training-steps", "max-steps", "lr-decay-iters", "num-training-steps"}},
      {"stop", {"stop-strings", "stop-sequences", "stop-words", "until"}},
      {"logging-freq", {"logging-steps", "log-interval", "log-freq"}},
      {"report-to", {"logger", "loggers", "tracker"}},
      {"lora-rank", {"r", "rank", "use-peft"}},
      {"weights", {"load-in-4bit", "quantization", "bnb-4bit-quant-type"}},
      {"tp", {"tensor-parallel-size", "tensor-model-parallel-size"}},
      {"ep", {"expert-parallel-size", "expert-model-parallel-size"}},
      {"cp", {"context-parallel-size"}},
      {"pp", {"pipeline-parallel-size", "pipeline-model-parallel-size"}},
      {"dp", {"data-parallel-size"}},
      {"n", {"group-size", "num-generations", "num-samples", "n-samples-per-prompt", "rollout-n"}},
      {"temperature", {"sampling-temperature"}},
      {"max-response-length", {"max-new-tokens", "max-tokens", "max-completion-length", "response-length"}},
      {"prompt-length", {"max-prompt-length"}},
      {"save-freq", {"save-steps", "save-interval", "save-every"}},
      {"test-freq", {"eval-steps", "eval-interval", "eval-every"}},
      {"repetitions", {"repeats", "rounds", "runs"}}};
  return names;
}

}  // namespace

std::string nearest_name(std::string_view name, const std::vector<std::string>& candidates) {
  constexpr std::size_t kLongestName = 200;  // the table is quadratic, and nobody mistypes an essay
  if (name.size() > kLongestName) return "";
  std::size_t fewest = std::max<std::size_t>(2, name.size() / 3) + 1;
  std::string nearest;
  for (const std::string& candidate : candidates) {
    // A candidate with nothing in common is no help: "-n" is one edit from any one-letter name.
    const std::size_t edits = edits_between(name, candidate);
    if (edits < fewest && edits < std::max(name.size(), candidate.size())) {
      fewest = edits;
      nearest = candidate;
    }
  }
  return nearest;
}

std::vector<std::string> names_elsewhere_of(const std::string& option) {
  const auto found = names_elsewhere().find(option);
  return found == names_elsewhere().end() ? std::vector<std::string>() : found->second;
}

std::string nearest_option(std::string_view name, const std::vector<std::string>& options) {
  std::string asked(name);
  std::replace(asked.begin(), asked.end(), '_', '-');
  std::vector<std::string> known = options, meant = options;
  for (const std::string& option : options)
    if (const auto found = names_elsewhere().find(option); found != names_elsewhere().end())
      for (const std::string& other : found->second) known.push_back(other), meant.push_back(option);
  const auto nearest = std::find(known.begin(), known.end(), nearest_name(asked, known));
  return nearest == known.end() ? "" : meant[static_cast<std::size_t>(nearest - known.begin())];
}

}  // namespace espalier
