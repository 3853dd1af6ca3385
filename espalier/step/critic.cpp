#include "espalier/step/critic.h"

#include <algorithm>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/execute/critic_head.h"
#include "espalier/state/planning.h"
#include "espalier/step/over_ranks.h"

namespace espalier {
namespace {

Options critic_options(Options options) {
  options.lr = options.critic_lr;
  return options;
}

}  // namespace

Critic::Critic(std::unique_ptr<ModelState> model, const Options& options, const MachineProfile& machine,
               Workspace& workspace)
    : model_(std::move(model)), learner_(*model_, critic_options(options), machine, workspace) {
  ESPALIER_INTERNAL(model_->shape.value_head, model_->shape.architecture, " without a value head as a critic");
}

AdamW& Critic::optimizer() {
  if (!optimizer_)
    optimizer_.emplace(model_->table, model_->weights, AdamWSettings::from(learner_.options), model_->decoder.device(),
                       optimizer_ranks(learner_.options, model_->mesh));
  learner_.optimizer = &*optimizer_;
  return *optimizer_;
}

TokenSeries Critic::values_of(std::span<const Rollout> rollouts, Progress& progress) {
  ScoredValues scored =
      score_values(*model_, rollouts, learner_.options, learner_.machine, learner_.workspace, progress);
  values_seconds_ += scored.report.seconds;
  return std::move(scored.values);
}

CriticReport Critic::compute_gradient(const MiniBatch& mini_batch, bool all_tokens) {
  Timer timer;
  ValueObjective objective(mini_batch.rollouts, mini_batch.targets, learner_.options);
  CriticHead head(model_->decoder, mini_batch.rollouts, &objective, &learner_.gradients);
  CriticReport report{run_gradient_pass(learner_, mini_batch.rollouts, head, nullptr, all_tokens, timer)};
  report.loss = objective.parts();
  report.values = std::move(head.values());
  add_over_ranks(learner_.model.mesh, report.loss);
  gather_series(learner_.model.mesh, report.values);
  return report;
}

CriticReport Critic::update(const MiniBatch& mini_batch, const std::function<void(double share)>& on_share) {
  const AdamW& adamw = optimizer();
  learner_.on_share = on_share;
  CriticReport report = compute_gradient(mini_batch, false);
  learner_.on_share = {};
  report.update = update_weights(learner_);
  report.add_update(report.update);
  report.step = adamw.steps_done();
  report.values_seconds = std::exchange(values_seconds_, 0.0);
  return report;
}

std::unique_ptr<ModelState> load_critic(const CriticChoice& critic, const Options& options, const ModelShape& actor,
                                        Progress& progress, const Mesh& mesh) {
  auto model = load_value_model(critic.source, options.dtype, static_cast<std::uint64_t>(options.seed), progress, mesh,
                                critic.train);
  if (model->shape.vocabulary != actor.vocabulary)
    throw InputError({critic.source, text_of("a critic with the model's vocabulary of ", actor.vocabulary),
                      text_of("a vocabulary of ", model->shape.vocabulary),
                      "Actor and critic read the same token ids: give a critic with the same tokenizer"});
  return model;
}

ScoredValues score_values(const ModelState& model, std::span<const Rollout> rollouts, const Options& options,
                          const MachineProfile& machine, Workspace& workspace, Progress& progress) {
  CriticHead head(model.decoder, rollouts);
  const ForwardReport report = run_forward_pass({.decoder = model.decoder,
                                                 .rollouts = rollouts,
                                                 .options = options,
                                                 .machine = machine,
                                                 .workspace = workspace,
                                                 .progress = progress,
                                                 .task = "values",
                                                 .mesh = model.mesh},
                                                head);
  ScoredValues scored{std::move(head.values()), report};
  gather_series(model.mesh, scored.values);
  return scored;
}

}  // namespace espalier
