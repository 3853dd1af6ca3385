#include "espalier/doctor/doctor.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/data/training_data.h"
#include "espalier/doctor/history_faults.h"
#include "espalier/doctor/logprob_faults.h"
#include "espalier/doctor/probe.h"
#include "espalier/doctor/record_faults.h"
#include "espalier/measure/machine.h"
#include "espalier/services/tokenizer.h"
#include "espalier/shape/trained_parameters.h"
#include "espalier/state/held_models.h"
#include "espalier/state/trained_choice.h"

namespace espalier {
namespace {

// Whole rollouts of about `tokens` response tokens, spread evenly over the dump; at least one.
std::vector<Rollout> sample_of(const std::vector<Rollout>& rollouts, std::int64_t tokens) {
  std::int64_t all = 0;
  for (const Rollout& rollout : rollouts) all += rollout.response_length();
  const double share = all <= tokens ? 1 : static_cast<double>(tokens) / static_cast<double>(all);
  std::vector<Rollout> out;
  double due = 0;
  for (const Rollout& rollout : rollouts) {
    due += share;
    if (rollout.response_ids.empty() || (due < 1 && share < 1)) continue;
    due -= 1;
    out.push_back(rollout);
  }
  if (out.empty()) out.push_back(rollouts.front());
  return out;
}

class Replay {
 public:
  Replay(const Options& options, Progress& progress)
      : options_(options), progress_(progress), machine_(machine_profile(options, progress)) {}

  void look(Diagnosis& out) {
    const TrainedChoice choice = scored_choice(options_);
    const std::vector<Rollout> sample = sample_of(out.rollouts, options_.sample);
    out.replayed = static_cast<std::int64_t>(sample.size());
    for (const Rollout& rollout : sample) out.replayed_tokens += rollout.response_length();
    const ProbeWish wish{kProbedTokens, usual_temperatures()};
    const Probe rounded = [&] {
      const auto model = loaded(choice, DType::bfloat16, sample);
      return probe(*model, sample, {}, as(DType::bfloat16), machine_, progress_);
    }();
    const auto model = loaded(choice, options_.dtype, sample);
    const Probe found = probe(*model, sample, wish, options_, machine_, progress_);
    const Replayed replayed{sample, found, rounded, [&](const std::vector<Rollout>& others) {
                              return probe(*model, others, {}, options_, machine_, progress_);
                            }};
    take(out, logprob_faults(replayed));
    take(out, greedy_rows(replayed));
    for (std::size_t i = 0; i < sample.size(); ++i) {
      std::vector<double>& own = logprobs[static_cast<std::size_t>(sample[i].index)];
      if (!own.empty()) continue;
      for (const TokenProbe& token : found[i]) own.push_back(token.logprob);
    }
  }

  static void take(Diagnosis& out, std::vector<Finding> findings) {
    std::ranges::move(findings, std::back_inserter(out.findings));
  }

  std::vector<std::vector<double>> logprobs;  // of the dump's rollouts, where they are known

 private:
  Options as(DType dtype) const {
    Options out = options_;
    out.dtype = dtype;
    return out;
  }
  std::unique_ptr<ModelState> loaded(const TrainedChoice& choice, DType dtype, const std::vector<Rollout>& sample) {
    auto model = load_model(options_.model, dtype, progress_, mesh_of_one(), choice);
    std::int64_t longest = 0;
    for (const Rollout& rollout : sample) longest = std::max<std::int64_t>(longest, rollout.length());
    model->decoder.reserve_positions(longest);
    return model;
  }

  const Options& options_;
  Progress& progress_;
  MachineProfile machine_;
};

std::string joined(const std::vector<std::string>& paths) {
  std::string out;
  for (const std::string& path : paths) {
    if (!out.empty()) out += kBetweenPaths;
    out += path;
  }
  return out;
}

}  // namespace

Diagnosis diagnose(const std::vector<std::string>& paths, const Options& options, Progress& progress) {
  Diagnosis out;
  std::optional<LazyTokenizer> tokenizers;
  Tokenizer* tokenizer = nullptr;
  if (options.model.empty()) {
    ReadOptions reading;
    reading.temperature = options.temperature;
    RolloutFile file = read_rollouts(paths, reading);
    for (const std::string& note : file.notes) progress.note(note);
    out.rollouts = std::move(file.rollouts);
  } else {
    const ModelShape shape = read_trained_shape(options.model, scored_choice(options));
    require_room(std::array{HeldModel{local_shape(shape, mesh_of_one())}}, options);
    out.rollouts = read_for_model(joined(paths), shape, progress, {.temperature = options.temperature});
    tokenizer = tokenizers.emplace(options.model).at_hand(progress);
  }
  Replay::take(out, record_faults(out.rollouts));
  Replay::take(out, history_faults(out.rollouts, tokenizer));
  std::vector<std::vector<double>> logprobs;
  for (const Rollout& rollout : out.rollouts)
    logprobs.push_back(!rollout.rollout_logprobs.empty() ? rollout.rollout_logprobs : rollout.old_logprobs);
  if (!options.model.empty()) {
    Replay replay(options, progress);
    replay.logprobs = std::move(logprobs);
    replay.look(out);
    logprobs = std::move(replay.logprobs);
  }
  Replay::take(out, repeated_tokens(out.rollouts, logprobs));
  std::ranges::stable_sort(out.findings, [](const Finding& a, const Finding& b) { return a.sure < b.sure; });
  return out;
}

}  // namespace espalier
