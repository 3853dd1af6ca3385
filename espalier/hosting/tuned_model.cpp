#include "espalier/hosting/tuned_model.h"

#include <cmath>
#include <set>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/base/units.h"
#include "espalier/execute/language_head.h"
#include "espalier/hosting/datum_rollouts.h"
#include "espalier/ops/operations.h"
#include "espalier/plan/planner.h"
#include "espalier/shape/trained_parameters.h"
#include "espalier/step/held_models.h"
#include "espalier/step/pass.h"

namespace espalier {
namespace {

// The service's factor is alpha / rank with this alpha at every rank, so that all ranks want the same learning rate.
constexpr double kAlpha = 32;

std::int64_t longest_of(const std::vector<Rollout>& rollouts) {
  std::int64_t longest = 0;
  for (const Rollout& rollout : rollouts) longest = std::max<std::int64_t>(longest, rollout.length());
  return longest;
}

// A plan of its own budget: what this model holds, and what every call may use besides.
Options step_options(const Hosting& hosting, const HeldModel& held) {
  Options options = hosting.options;
  const HeldModel models[] = {held};
  options.memory_budget = text_of(bytes_held(models, options.dtype) + hosting.step_bytes, "B");
  return options;
}

[[noreturn]] void refuse_too_large(const StepTooLarge& step, const Options& options, const Hosting& hosting) {
  const std::int64_t given = parse_bytes(options.memory_budget), missing = step.needed - given;
  throw MemoryBudgetError(
      {"the call",
       text_of("one that fits the ", format_bytes(hosting.step_bytes), " which this server keeps for calls"),
       text_of("one that needs ", format_bytes(hosting.step_bytes + missing)),
       text_of("send fewer or shorter data, or start the server with a --memory-budget that is larger by ",
               format_bytes(2 * missing))});
}

}  // namespace

AdapterChoice adapter_choice(const serve::LoraConfig& lora, const ModelShape& shape) {
  const auto has = [](const std::string& module, const char* part) { return module.find(part) != module.npos; };
  auto modules = std::make_shared<std::set<std::string>>();
  ModelShape whole = shape;
  whole.trained = {};
  for (const std::string& module : adaptable_modules(whole)) {
    const bool mixer =
        has(module, ".self_attn.") || has(module, ".linear_attn.") || has(module, ".mamba.") || has(module, ".conv.");
    const bool head = module == "lm_head", router = module.ends_with("." + module_name(shape.names.router));
    if (head ? lora.head : mixer ? lora.attention : lora.mlp && !router) modules->insert(module);
  }
  AdapterChoice choice;
  choice.rank = lora.rank, choice.alpha = kAlpha, choice.seed = lora.seed;
  choice.any_rank = true;
  choice.modules = std::move(modules);
  return choice;
}

struct TunedModel::Pass {
  std::vector<RolloutSeries> series;
  std::vector<double> loss;  // of each datum
  std::int64_t clipped = 0, logical_rows = 0, physical_rows = 0;
};

TunedModel::TunedModel(HostedBase& base, Hosting& hosting, const serve::LoraConfig& lora)
    : base_(base),
      hosting_(hosting),
      lora_(lora),
      model_(adapted_model(base.model(), adapter_choice(lora, base.model().shape))),
      optimizer_(model_->table, model_->weights, AdamWSettings{}, model_->decoder.device()) {}

std::int64_t TunedModel::held_bytes() const {
  const auto bytes = static_cast<std::int64_t>(model_->weights.nbytes());
  return bytes + 4 * static_cast<std::int64_t>(optimizer_.exp_avg().nbytes());
}

TunedModel::Pass TunedModel::run_backward(const serve::TrainingCall& call) {
  const DatumRollouts data(call);
  base_.reserve_positions(model_->decoder, longest_of(data.rollouts));
  Timer timer;
  Learner learner(*model_, hosting_.options, hosting_.machine, hosting_.workspace, &optimizer_);
  learner.options = step_options(hosting_, learner.held());
  DatumLoss loss(data.terms);
  LanguageHead head(model_->decoder, data.rollouts, hosting_.workspace.arena, &loss, &learner.gradients);
  PassReport report;
  try {
    report = run_gradient_pass(learner, data.rollouts, head, nullptr, true, timer);
  } catch (const StepTooLarge& step) {
    refuse_too_large(step, learner.options, hosting_);
  }
  Pass pass;
  for (std::size_t i = 0; i < data.rollouts.size(); ++i) {
    const auto rollout = static_cast<std::int32_t>(i);
    pass.loss.push_back(loss.loss(rollout));
    pass.clipped += loss.clipped(rollout);
    if (!std::isfinite(pass.loss.back()))
      throw InputError({data.rollouts[i].where, "a finite loss", text_of(pass.loss.back()),
                        "check its log-probs, advantages and weights for extreme values"});
  }
  add_gradient(learner.gradients.flat());
  pass.series = std::move(head.series());
  pass.logical_rows = report.plan.logical_rows, pass.physical_rows = report.plan.physical_rows();
  return pass;
}

TunedModel::Pass TunedModel::run_forward(const serve::TrainingCall& call) {
  const DatumRollouts data(call);
  base_.reserve_positions(model_->decoder, longest_of(data.rollouts));
  const Options options = step_options(hosting_, {model_->decoder.local(), kWeightsOnly});
  LanguageHead head(model_->decoder, data.rollouts, hosting_.workspace.arena);
  NoProgress silent;
  ForwardReport report;
  try {
    report = run_forward_pass({.decoder = model_->decoder,
                               .rollouts = data.rollouts,
                               .options = options,
                               .machine = hosting_.machine,
                               .workspace = hosting_.workspace,
                               .progress = silent,
                               .task = "log-probs"},
                              head);
  } catch (const StepTooLarge& step) {
    refuse_too_large(step, options, hosting_);
  }
  DatumLoss loss(data.terms);
  Pass pass;
  pass.series = std::move(head.series());
  for (std::size_t i = 0; i < data.rollouts.size(); ++i) {
    const auto rollout = static_cast<std::int32_t>(i);
    RolloutSeries& series = pass.series[i];
    std::vector<double> unused(series.logprob.size()), unused_too(series.logprob.size());
    loss.add_rollout(rollout, series.logprob, series.entropy, unused, unused_too);
    pass.loss.push_back(loss.loss(rollout));
    pass.clipped += loss.clipped(rollout);
  }
  pass.logical_rows = report.logical_rows, pass.physical_rows = report.physical_rows;
  return pass;
}

serve::TrainingAnswer TunedModel::forward_backward(const serve::TrainingCall& call) {
  Pass pass;
  try {
    pass = call.backward ? run_backward(call) : run_forward(call);
  } catch (const std::exception& error) {
    if (call.backward) break_gradient(error.what());
    throw;
  }
  serve::TrainingAnswer answer;
  double loss = 0;
  std::size_t targets = 0;
  for (std::size_t i = 0; i < pass.series.size(); ++i) {
    loss += pass.loss[i];
    const std::vector<double>& logprob = pass.series[i].logprob;
    answer.logprobs.emplace_back(logprob.begin(), logprob.end());
    targets += logprob.size();
  }
  answer.metrics = {{"loss:sum", loss},
                    {"tokens_computed:sum", static_cast<double>(pass.physical_rows)},
                    {"tokens_shared:sum", static_cast<double>(pass.logical_rows - pass.physical_rows)}};
  if (call.loss == serve::LossName::ppo || call.loss == serve::LossName::cispo || call.loss == serve::LossName::gspo)
    answer.metrics["clip_fraction:mean"] = static_cast<double>(pass.clipped) / static_cast<double>(targets);
  return answer;
}

void TunedModel::add_gradient(const at::Tensor& gradient) {
  if (!gradient_.defined()) {
    gradient_ = gradient;  // the learner that made it ends
    return;
  }
  const at::Tensor sum = gradient_.unsqueeze(0);
  model_->decoder.device().operations().add_scaled(sum, gradient.unsqueeze(0), 1, sum);
}

void TunedModel::drop_gradient() {
  gradient_ = at::Tensor();
  broken_.reset();
}

void TunedModel::break_gradient(const std::string& why) {
  if (!broken_) broken_ = why;
}

AdamW::Update TunedModel::step(const serve::AdamParams& params) {
  if (broken_) {
    const std::string why = *broken_;
    drop_gradient();
    throw InputError({"optim_step", "a whole gradient",
                      "one that lacks the part of a request that failed (" + why + ")",
                      "the gradient has been dropped and no step was taken: send the data again"});
  }
  AdamWSettings settings;
  settings.lr = params.learning_rate, settings.beta1 = params.beta1, settings.beta2 = params.beta2;
  settings.eps = params.eps, settings.weight_decay = params.weight_decay,
  settings.max_grad_norm = params.grad_clip_norm;
  if (!gradient_.defined()) {  // nothing came since the last step: the moments decay all the same
    gradient_ = model_->decoder.device().allocate(optimizer_.exp_avg().sizes(), optimizer_.exp_avg().scalar_type());
    model_->decoder.device().operations().zero(gradient_);
  }
  const at::Tensor gradient = gradient_;
  drop_gradient();
  const AdamW::Update update = optimizer_.step(gradient, settings);
  ++model_->updates;
  return update;
}

}  // namespace espalier
