#include "espalier/score/score.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <span>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/checkpoint/model_directory.h"
#include "espalier/config/model_config.h"
#include "espalier/data/training_data.h"
#include "espalier/measure/machine.h"
#include "espalier/objective/score_loss.h"
#include "espalier/options/column_names.h"
#include "espalier/parallel/agreement.h"
#include "espalier/rollout/writer.h"
#include "espalier/state/held_models.h"
#include "espalier/state/model_state.h"
#include "espalier/state/planning.h"
#include "espalier/state/trained_choice.h"
#include "espalier/step/critic.h"
#include "espalier/step/over_ranks.h"
#include "espalier/step/pass.h"

namespace espalier {
namespace {

std::vector<ExtraSeries> extras_of(const RolloutSeries& series, const Options& options) {
  std::vector<ExtraSeries> extras{{options.as, series.logprob}};
  if (options.entropies) extras.push_back({"entropies", series.entropy});
  return extras;
}

void check_score_options(const Options& options) {
  if (options.out.empty()) throw OptionError({"--out", "a file to write", "nothing", "give --out scored.jsonl"});
  if (options.values && options.critic.empty())
    throw OptionError({"--values", "--critic DIR with it", "no critic", "name the critic, or leave --values out"});
  if (!options.values && !options.critic.empty())
    throw OptionError({"--critic", "--values with it", "no --values", "add --values to write the critic's values"});
}

std::int32_t longest_of(std::span<const Rollout> rollouts) {
  std::int32_t longest = 0;
  for (const Rollout& rollout : rollouts) longest = std::max(longest, rollout.length());
  return longest;
}

// A record has no place for NaN, and nobody should train on one.
void check_finite(std::span<const double> series, const Rollout& rollout, const std::string& model) {
  const auto bad = std::ranges::find_if_not(series, [](double value) { return std::isfinite(value); });
  if (bad != series.end())
    throw InputError({model, "weights that give finite numbers",
                      text_of(*bad, " at response token ", bad - series.begin(), " of ", rollout.where),
                      "are the weights damaged, or too large for --dtype?"});
}

// A reward model gives every response one number.
void check_without_logprobs(const Options& options) {
  const auto refuse = [&](bool given, const char* name) {
    if (given)
      throw OptionError({name, "a language model with it", options.model + ", a reward model: it writes reward",
                         text_of("leave ", name, " out")});
  };
  refuse(options.values, "--values");
  refuse(options.entropies, "--entropies");
  refuse(options.as != "logprobs", "--as");
}

// Records of one response each, whose reward is the reward model's. `rollouts` end with scores.
ScoreReport write_scores(std::vector<Rollout> rollouts, const ScoredValues& scored, const Options& options,
                         std::optional<RolloutWriter>& writer) {
  ScoreReport report;
  report.scores = true;
  report.seconds = scored.report.seconds;
  report.logical_rows = scored.report.logical_rows, report.physical_rows = scored.report.physical_rows;
  report.rollouts = static_cast<std::int64_t>(rollouts.size());
  for (std::size_t i = 0; i < rollouts.size(); ++i) {
    Rollout& rollout = rollouts[i];
    check_finite(std::span(scored.values[i]).last(1), rollout, options.model);
    rollout.reward = scored.values[i].back();
    rollout.response_ids.pop_back();
    rollout.pair = {};
    report.tokens += rollout.response_length();
    if (writer) writer->write(rollout, {});
  }
  if (writer) writer->finish();
  return report;
}

}  // namespace

ScoredRollouts score_rollouts(const Decoder& decoder, std::span<const Rollout> rollouts, const Options& options,
                              const MachineProfile& machine, Workspace& workspace, Progress& progress,
                              moe::LoadAccounting* counts, const Mesh& mesh) {
  LanguageHead head(decoder, rollouts, workspace.arena);
  const ForwardReport report = run_forward_pass({.decoder = decoder,
                                                 .rollouts = rollouts,
                                                 .options = options,
                                                 .machine = machine,
                                                 .workspace = workspace,
                                                 .progress = progress,
                                                 .task = "scoring",
                                                 .counts = counts,
                                                 .mesh = mesh},
                                                head);
  gather_series(mesh, head.series());
  return {std::move(head.series()), report.logical_rows, report.physical_rows, report.seconds};
}

TextRows scored_rows(const Options& options) {
  if (!scores_answers(options)) require_no_columns(options);
  return scores_answers(options) ? TextRows{name_of(ObjectiveKind::reward), options.model, options.columns}
                                 : TextRows{};
}

ScoreReport score(const Options& options, Progress& progress, const Mesh& mesh) {
  check_score_options(options);
  const TrainedChoice choice = scored_choice(options, true);
  if (choice.scores) check_without_logprobs(options);
  std::vector<HeldModel> held{{local_shape(read_trained_shape(options.model, choice), mesh)}};
  if (const auto critic = scored_critic(options)) held.push_back({local_shape(read_critic_shape(*critic), mesh)});
  AsRead as_read;
  std::vector<Rollout> rollouts = read_for_model(options.rollouts, held.front().shape.whole(), progress,
                                                 record_use_of(options, scored_rows(options)), &as_read);
  const MachineProfile machine = machine_profile(options, progress, mesh);
  std::vector<std::vector<std::uint8_t>> masks;  // as read
  if (choice.scores) {
    for (const Rollout& rollout : rollouts) masks.push_back(rollout.loss_mask);
    end_with_scores(rollouts);
  }
  StepsFit fit;
  fit.add(held, options, machine, rollouts, true, mesh);
  fit.require();
  const auto model = load_model(options.model, options.dtype, progress, mesh, choice);
  model->decoder.reserve_positions(longest_of(rollouts));
  require_same(mesh.world, split_paths(options.rollouts).front(), fingerprint_of(rollouts),
               "give every rank the same files");
  std::optional<RolloutWriter> writer;  // before the work, so that an unwritable place costs nothing
  if (mesh.writes()) writer.emplace(options.out);

  Workspace workspace(budget_of(options).beside_held());
  // The arena keeps what the first model touched while the second runs, so both are planned with the other beside them.
  const HeldBytes weights(workspace, held.front().bytes(options.dtype));
  const HeldBytes critic_weights(workspace, bytes_beside(held.front(), held, options.dtype));  // loaded later
  if (choice.scores) {
    const ScoredValues scores = score_values(*model, rollouts, options, machine, workspace, progress);
    for (std::size_t i = 0; i < rollouts.size(); ++i) {
      rollouts[i].loss_mask = std::move(masks[i]);
      as_read.give_back(i, rollouts[i]);
    }
    return write_scores(std::move(rollouts), scores, options, writer);
  }
  const ScoredRollouts scored =
      score_rollouts(model->decoder, rollouts, options, machine, workspace, progress, nullptr, mesh);
  ScoreReport report;
  report.seconds = scored.seconds;
  report.logical_rows = scored.logical_rows;
  report.physical_rows = scored.physical_rows;
  ScoredValues critic;
  if (options.values) {
    const auto value_model = load_critic(*scored_critic(options), options, model->shape, progress, mesh);
    value_model->decoder.reserve_positions(longest_of(rollouts));
    critic = score_values(*value_model, rollouts, options, machine, workspace, progress);
    report.seconds += critic.report.seconds;
  }
  for (std::size_t i = 0; i < rollouts.size(); ++i) {
    check_finite(scored.series[i].logprob, rollouts[i], options.model);
    if (options.values) check_finite(critic.values[i], rollouts[i], options.critic);
    report.tokens += rollouts[i].response_length();
    std::vector<ExtraSeries> extras = extras_of(scored.series[i], options);
    if (options.values) extras.push_back({"values", critic.values[i]});
    as_read.give_back(i, rollouts[i]);  // nothing is lost by scoring
    if (writer) writer->write(rollouts[i], extras);
  }
  report.rollouts = static_cast<std::int64_t>(rollouts.size());
  if (writer) writer->finish();
  return report;
}

}  // namespace espalier
