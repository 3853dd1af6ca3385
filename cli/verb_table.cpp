// The table of verbs: short letter, name, arguments, options it must have, one line of help, the function.

#include <limits>

#include "cli/verbs.h"

namespace espalier::cli {

const std::vector<Verb>& verbs() {
  constexpr const char* kOutputs = "out|gradients|logprobs|rollout-metrics|record";
  constexpr std::size_t kAny = std::numeric_limits<std::size_t>::max();
  // clang-format off
  static const std::vector<Verb> table = {
      {'i', "inspect", "ROLLOUTS...", 1, kAny, {}, "sizes, what sharing could save, every anomaly", run_inspect},
      {'c', "convert", "IN OUT", 2, 2, {}, "any supported format to the neutral one (.jsonl, .gz, .zst)", run_convert},
      {'p', "plan", "", 0, 0, {"model", "rollouts|frontier"}, "the schedule that would run, its time and memory", run_plan},
      {'t', "train", "", 0, 0, {"model|resume", "rollouts", kOutputs}, "update a model from recorded rollouts", run_train},
      {'s', "score", "", 0, 0, {"model", "rollouts", "out"}, "log-probs of recorded rollouts, forward only", run_score},
      {'v', "verify", "", 0, 0, {"model", "rollouts"}, "the same step dense and shared: is it the same?", run_verify},
      {'r', "replay", "TRACE_DIR|ROLLOUTS", 1, 1, {}, "run recorded updates again and compare with the record", run_replay},
      {'g', "generate", "", 0, 0, {"model", "prompts", "out"}, "responses to prompts, each prompt computed once", run_generate},
      {'l', "grpo", "", 0, 0, {"out|resume"}, "the closed loop: generate, reward, update, evaluate", run_grpo},
      {'e', "serve", "", 0, 0, {"model"}, "a training server for clients of the tinker SDK", run_serve},
      {'o', "report", "RUN_DIR", 1, 1, {}, "a run as one HTML file: curves, time, memory, schedule, samples", run_report},
      {'a', "merge", "[ADAPTER]", 0, 1, {"model", "out"}, "a model and a LoRA adapter as one model", run_merge},
      {'x', "doctor", "DUMP...", 1, kAny, {}, "which known faults a dump shows, with the rows that prove it", run_doctor},
      {'b', "bench", "", 0, 0, {}, "dense, packed, phased and auto against each other", run_bench},
      {'d', "selftest", "", 0, 0, {}, "every operation of --device against the CPU's answer", run_selftest},
      {'m', "completion", "bash|zsh|fish", 1, 1, {}, "a script that completes this command line in a shell", run_completion},
  };
  // clang-format on
  return table;
}

}  // namespace espalier::cli
