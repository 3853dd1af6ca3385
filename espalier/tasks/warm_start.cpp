#include "espalier/tasks/warm_start.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/checkpoint/atomic_output.h"
#include "espalier/checkpoint/run_state.h"
#include "espalier/data/training_data.h"
#include "espalier/loop/random_streams.h"
#include "espalier/score/score.h"
#include "espalier/train/trained_model.h"
#include "espalier/train/trainer.h"

namespace espalier {
namespace {

// Supervised learning as a policy update: the plain policy gradient with advantage 1 is the gradient of -log p.
Options supervised(const Options& options) {
  Options out = options;
  out.policy_loss = "reinforce";
  out.adv_estimator = "given";
  out.loss_agg_mode = "token-mean";
  out.rollout_is = "none";
  out.loss_scale_factor = out.kl_loss_coef = out.entropy_coeff = out.opd_kl_coef = 0;
  out.lr = options.warm_start_lr;
  out.warmup_steps = 0;
  out.lr_scheduler_type = LrSchedule::constant;
  out.mini_batch_size = out.token_budget = 0;
  out.schedule = "auto";  // what is asked for is for the loop's updates
  return out;
}

Rollout demonstration(const Problem& problem) {
  Rollout out;
  out.prompt_ids = problem.prompt_ids;
  out.response_ids = problem.answer_ids;
  out.response_ids.push_back(Vocabulary::built_in().end());
  out.loss_mask.assign(out.response_ids.size(), 1);
  out.advantages.assign(out.response_ids.size(), 1.0);
  return out;
}

// The mean over rollouts of exp(sum of log p): the probability of a whole answer.
double mean_probability(std::span<const RolloutSeries> series) {
  double sum = 0;
  for (const RolloutSeries& s : series) sum += std::exp(std::accumulate(s.logprob.begin(), s.logprob.end(), 0.0));
  return sum / static_cast<double>(series.size());
}

// Some kQuestions questions, at most kMostQuestions about one document.
std::vector<Rollout> demonstrations(const Task& task, Split split, Random random) {
  constexpr std::int64_t kQuestions = 256, kMostQuestions = 16;
  std::vector<Rollout> out;
  for (std::uint64_t document = 0; static_cast<std::int64_t>(out.size()) < kQuestions; ++document)
    for (const Problem& problem : task.problems(split, random.fork(document), kMostQuestions))
      out.push_back(demonstration(problem));
  return out;
}

}  // namespace

Curriculum::Curriculum(const Task& full) : task_(full), full_length_(full.prompt_length) {
  task_.prompt_length = std::min(full_length_, task_.shortest_prompt());
}

void Curriculum::advance(double right) {
  constexpr double kWeight = 0.2;  // of the newest step
  smoothed_ += kWeight * (right - smoothed_);
  if (smoothed_ < kStageRight) return;
  task_.prompt_length = std::min(full_length_, 2 * task_.prompt_length);
  smoothed_ = 0;
}

void Curriculum::restore(std::int64_t prompt_length, double smoothed) {
  task_.prompt_length = prompt_length;
  smoothed_ = smoothed;
}

TaskWarmStart::TaskWarmStart(ModelState& model, const Task& task, const Options& options, const MachineProfile& machine)
    : model_(model),
      options_(supervised(options)),
      machine_(machine),
      optimizer_(model.table, model.weights, AdamWSettings::from(options_), model.decoder.device(),
                 {.world = model.mesh.world}),
      actor_(model, options_, machine, &optimizer_),
      held_out_(demonstrations(task, Split::held_out, random_of(options.seed, Stream::warm_start_held_out))),
      curriculum_(task) {}

WarmStartStep TaskWarmStart::step() {
  const Random draws = random_of(options_.seed, Stream::warm_start).fork(static_cast<std::uint64_t>(last_.step));
  const TrainingData data(demonstrations(curriculum_.task(), Split::train, draws), options_);
  const StepReport report = run_step(actor_, data.mini_batch(0), false);
  WarmStartStep found{report.step, report.gradient.loss.loss, mean_probability(report.gradient.series),
                      curriculum_.task().prompt_length, std::nullopt};
  curriculum_.advance(found.right);
  if (found.step % kProbeEvery == 0) {
    NoProgress silent;  // a part of the task that is shown
    found.held_out = mean_probability(
        score_rollouts(model_.decoder, held_out_, options_, machine_, actor_.workspace, silent, nullptr, model_.mesh)
            .series);
  }
  return found;
}

bool TaskWarmStart::run(Progress& progress, const std::function<void(const WarmStartStep&)>& on_step) {
  progress.begin("warm start", options_.warm_start_steps, "steps");
  while (last_.step < options_.warm_start_steps && !learned()) {
    if (signal_of_any_rank(progress, model_.mesh) != 0) return false;
    last_ = step();
    on_step(last_);
    progress.advance_to(last_.step);
  }
  progress.end();
  return true;
}

void TaskWarmStart::save(const std::filesystem::path& directory, std::int64_t metrics_bytes) const {
  RunState state;
  state.random_state = std::to_string(options_.seed);
  state.extra = Json{{"metrics_bytes", metrics_bytes},
                     {"prompt_length", curriculum_.task().prompt_length},
                     {"smoothed", curriculum_.smoothed()}}
                    .dump();
  std::optional<AtomicDirectory> target;
  if (model_.mesh.writes()) target.emplace(directory);
  save_trained_model(target ? target->path() : std::filesystem::path(), model_, optimizer_, state, options_.save_dtype);
  if (target) target->commit();
}

std::int64_t TaskWarmStart::load(const std::filesystem::path& directory) {
  const RunState former = continue_trained_model(directory, model_, optimizer_);
  const Json extra = Json::parse(former.extra);
  for (const char* member : {"metrics_bytes", "prompt_length", "smoothed"})
    if (!extra.contains(member))
      throw InputError({(directory / "espalier" / "state.json").string(), text_of("a warm start with ", member), "none",
                        "start the run again with --overwrite"});
  last_.step = former.step;
  curriculum_.restore(extra["prompt_length"].get<std::int64_t>(), extra["smoothed"].get<double>());
  return extra["metrics_bytes"].get<std::int64_t>();
}

}  // namespace espalier
