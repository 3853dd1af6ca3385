#include "espalier/loop/warm_start.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/loop/random_streams.h"
#include "espalier/optimizer/adamw.h"
#include "espalier/step/step.h"
#include "espalier/train/score.h"
#include "espalier/train/training_data.h"

namespace espalier {
namespace {

// Supervised learning as a policy update: the plain policy gradient with advantage 1 is the gradient of -log p.
Options supervised(const Options& options) {
  Options out = options;
  out.policy_loss = "reinforce";
  out.adv_estimator = "given";
  out.loss_agg_mode = "token-mean";
  out.rollout_is = "none";
  out.loss_scale_factor = out.kl_loss_coef = out.entropy_coeff = 0;
  out.lr = options.warm_start_lr;
  out.warmup_steps = 0;
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

// Documents that grow to the full length.
class Curriculum {
 public:
  explicit Curriculum(const Task& full) : task_(full), full_length_(full.prompt_length) {
    task_.prompt_length = std::min(full_length_, task_.shortest_prompt());
  }

  const Task& task() const { return task_; }

  void advance(double right) {
    constexpr double kWeight = 0.2;  // of the newest step
    smoothed_ += kWeight * (right - smoothed_);
    if (smoothed_ < kStageRight) return;
    task_.prompt_length = std::min(full_length_, 2 * task_.prompt_length);
    smoothed_ = 0;
  }

 private:
  Task task_;
  std::int64_t full_length_;
  double smoothed_ = 0;
};

}  // namespace

WarmStartStep warm_start(ModelState& model, const Task& task, const Options& given, const MachineProfile& machine,
                         Progress& progress, const std::function<void(const WarmStartStep&)>& on_step) {
  const Options options = supervised(given);
  Actor actor(model, options, machine);
  AdamW optimizer(model.table, model.weights, AdamWSettings::from(options));
  const Random random = random_of(options.seed, Stream::warm_start);
  const auto held_out = demonstrations(task, Split::held_out, random_of(options.seed, Stream::warm_start_held_out));
  Curriculum curriculum(task);
  WarmStartStep found;
  progress.begin("warm start", options.warm_start_steps, "steps");
  while (found.step < options.warm_start_steps && found.held_out.value_or(0) < kWarmStartRight) {
    const Random draws = random.fork(static_cast<std::uint64_t>(found.step));
    const TrainingData data(demonstrations(curriculum.task(), Split::train, draws), options);
    const StepReport report = run_step(actor, optimizer, data.mini_batch(0), false);
    found = {report.step, report.gradient.loss.loss, mean_probability(report.gradient.series),
             curriculum.task().prompt_length, std::nullopt};
    curriculum.advance(found.right);
    if (found.step % kProbeEvery == 0) {
      NoProgress silent;  // a part of the task that is shown
      found.held_out =
          mean_probability(score_rollouts(model.decoder, held_out, options, machine, actor.arena, silent).series);
    }
    on_step(found);
    progress.advance_to(found.step);
  }
  progress.end();
  return found;
}

}  // namespace espalier
