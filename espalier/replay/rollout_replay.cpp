#include "espalier/replay/rollout_replay.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "espalier/base/error.h"
#include "espalier/checkpoint/model_directory.h"
#include "espalier/config/model_config.h"
#include "espalier/data/training_data.h"
#include "espalier/measure/machine.h"
#include "espalier/parallel/agreement.h"
#include "espalier/shape/trained_parameters.h"
#include "espalier/state/planning.h"
#include "espalier/state/trained_choice.h"
#include "espalier/step/step.h"

namespace espalier {

std::optional<LogprobDifference> logprob_difference(std::span<const Rollout> rollouts,
                                                    std::span<const RolloutSeries> series) {
  LogprobDifference out;
  double sum = 0, kl = 0;
  for (std::size_t i = 0; i < rollouts.size(); ++i) {
    const Rollout& rollout = rollouts[i];
    for (std::size_t t = 0; t < rollout.old_logprobs.size(); ++t) {
      if (!rollout.loss_mask[t]) continue;
      const double d = series[i].logprob[t] - rollout.old_logprobs[t];
      out.max_abs = std::max(out.max_abs, std::abs(d));
      sum += std::abs(d);
      kl += std::expm1(d) - d;
      ++out.tokens;
    }
  }
  if (out.tokens == 0) return {};
  out.mean_abs = sum / static_cast<double>(out.tokens);
  out.kl = kl / static_cast<double>(out.tokens);
  return out;
}

ReplayReport replay_rollouts(const std::string& path, const Options& options, Progress& progress,
                             const std::function<void(const ReplayStep&)>& on_step, const Mesh& mesh) {
  if (!std::filesystem::exists(path))
    throw InputError({path, "a trace directory, or rollouts", "nothing there", "check the path"});
  if (options.model.empty())
    throw OptionError({"--model", "the model that the rollouts were recorded with", "nothing",
                       "give --model DIR; only a trace (a folder with trace.json) brings its own"});
  const ModelShape shape = read_trained_shape(options.model, trained_choice(options));
  const TrainingData data(read_for_model(path, shape, progress, record_use_of(options)), options);
  require_same(mesh.world, path, data.fingerprint(), "give every rank the same files");
  const std::int64_t all = options.epochs * data.mini_batches();
  const std::int64_t steps = options.steps == 0 ? all : std::min(options.steps, all);
  const MachineProfile machine = machine_profile(options, progress, mesh);
  const std::vector<HeldModel> held{{local_shape(shape, mesh), {}}};
  StepsFit fit;
  for (std::int64_t i = 0; i < std::min(steps, data.mini_batches()); ++i)
    fit.add(held, options, machine, data.mini_batch(i).rollouts, false, mesh);
  fit.require();
  const auto model = load_model(options.model, options.dtype, progress, mesh, trained_choice(options));
  model->decoder.reserve_positions(data.longest());
  AdamW optimizer(model->table, model->weights, AdamWSettings::from(options), model->decoder.device(),
                  {.world = mesh.world});
  optimizer.set_last_step(steps);
  Actor actor(*model, options, machine, &optimizer);

  constexpr std::int64_t kParts = 1000;  // a step may be long
  ReplayReport report;
  progress.begin("replaying", steps * kParts, "thousandths of steps");
  for (std::int64_t i = 0; i < steps; ++i) {
    const MiniBatch mini_batch = data.mini_batch(i % data.mini_batches());
    actor.on_share = [&](double share) {
      progress.advance_to(i * kParts + std::llround(share * static_cast<double>(kParts)));
    };
    const StepReport step = run_step(actor, mini_batch, false);
    ReplayStep out;
    out.step = data.has_steps() ? *mini_batch.rollouts.front().step : i + 1;
    out.loss = step.gradient.loss.loss;
    out.grad_norm = step.update.grad_norm;
    out.logprobs = logprob_difference(mini_batch.rollouts, step.gradient.series);
    report.steps.push_back(out);
    on_step(out);
  }
  progress.end();
  return report;
}

}  // namespace espalier
