#include "espalier/hosting/tuned_model.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/sub.h>

#include <cmath>
#include <set>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/base/units.h"
#include "espalier/checkpoint/added_values.h"
#include "espalier/checkpoint/run_state.h"
#include "espalier/execute/language_head.h"
#include "espalier/hosting/datum_rollouts.h"
#include "espalier/ops/operations.h"
#include "espalier/plan/planner.h"
#include "espalier/shape/trained_parameters.h"
#include "espalier/state/held_models.h"
#include "espalier/step/pass.h"
#include "espalier/train/trained_model.h"

namespace espalier {
namespace {

// The service's factor is alpha / rank with this alpha at every rank, so that all ranks want the same learning rate.
constexpr double kAlpha = 32;

std::int64_t longest_of(const std::vector<Rollout>& rollouts) {
  std::int64_t longest = 0;
  for (const Rollout& rollout : rollouts) longest = std::max<std::int64_t>(longest, rollout.length());
  return longest;
}

// Rows of a wave after which others have their turn, where the user does not say.
constexpr std::int64_t kRowsOfTurn = 8192;

// Bytes that a model and the process hold beside a call.
std::int64_t held_beside_call(const HeldModel& held, DType dtype) {
  const HeldModel models[] = {held};
  return bytes_held(models, dtype);
}

// A plan of its own budget: what this model holds, and `bytes` besides.
Options step_options(const Hosting& hosting, const HeldModel& held, std::int64_t bytes) {
  Options options = hosting.options;
  options.memory_budget = text_of(held_beside_call(held, options.dtype) + bytes, "B");
  return options;
}

// Begins a call once it is planned.
std::function<void(const StepPlan&)> begin_planned(CallMemory::Turns& turns, std::int64_t held) {
  return [&turns, held](const StepPlan& plan) {
    turns.begin(plan.chosen.bytes.peak() - held, plan.trunks + plan.waves <= 1);
  };
}

// Progress of a pass: a pause after each item.
class Pauses final : public Progress {
 public:
  explicit Pauses(CallMemory::Turns& turns) : turns_(turns) {}
  void begin(std::string_view, std::int64_t, std::string_view) override {}
  void advance_to(std::int64_t) override { turns_.pause(); }
  void end() override {}
  void note(std::string_view) override {}

 private:
  CallMemory::Turns& turns_;
};

struct Running {
  explicit Running(bool& flag) : runs(flag) { runs = true; }
  ~Running() { runs = false; }
  bool& runs;
};

[[noreturn]] void refuse_too_large(const StepTooLarge& step, const Options& options, const Hosting& hosting) {
  const std::int64_t given = parse_bytes(options.memory_budget), missing = step.needed - given;
  throw MemoryBudgetError(
      {"the call",
       text_of("one that fits the ", format_bytes(hosting.calls.bytes()), " which this server keeps for calls"),
       text_of("one that needs ", format_bytes(hosting.calls.bytes() + missing)),
       text_of("send fewer or shorter data, or start the server with a --memory-budget that is larger by ",
               format_bytes(2 * missing))});
}

}  // namespace

AdditionChoice additions_of(const serve::TunedPart& part, const ModelShape& shape) {
  const auto has = [](const std::string& module, const char* name) { return module.find(name) != module.npos; };
  auto modules = std::make_shared<std::set<std::string>>();
  ModelShape whole = shape;
  whole.trained = {};
  for (const std::string& module : adaptable_modules(whole)) {
    const bool mixer =
        has(module, ".self_attn.") || has(module, ".linear_attn.") || has(module, ".mamba.") || has(module, ".conv.");
    const bool head = module == "lm_head", router = module.ends_with("." + module_name(shape.names.router));
    if (head ? part.head : mixer ? part.attention : part.mlp && !router) modules->insert(module);
  }
  AdditionChoice choice;
  choice.rank = part.rank, choice.alpha = kAlpha, choice.seed = part.seed;
  choice.any_rank = true;
  choice.modules = std::move(modules);
  return choice;
}

struct TunedModel::Pass {
  std::vector<RolloutSeries> series;
  std::vector<double> loss;           // of each datum
  std::vector<std::int64_t> clipped;  // targets of each datum
  std::int64_t logical_rows = 0, physical_rows = 0;
  std::optional<double> check;  // difference to a run without sharing
};

TunedModel::TunedModel(HostedBase& base, Hosting& hosting, const serve::TunedPart& part, const serve::Pause& pause)
    : base_(base),
      hosting_(hosting),
      part_(part),
      model_(adapted_model(base.model(), additions_of(part, base.model().shape), pause)),
      optimizer_(model_->table, model_->weights, AdamWSettings{}, model_->decoder.device()) {}

std::unique_ptr<ModelState> load_tuned(const HostedBase& base, const serve::TunedPart& part,
                                       const std::filesystem::path& folder, const serve::Pause& pause) {
  AdditionChoice choice = additions_of(part, base.model().shape);
  choice.directory = folder;
  return adapted_model(base.model(), choice, pause);
}

namespace {

void require_state(const std::filesystem::path& folder) {
  if (!std::filesystem::exists(folder / "espalier" / "state.json"))
    throw InputError({folder.filename().string(), "a checkpoint with the optimizer's state", "weights for sampling",
                      "load it without the optimizer, or save with save_state"});
}

}  // namespace

void check_checkpoint(const HostedBase& base, const std::filesystem::path& folder, bool optimizer) {
  ModelShape shape = base.model().shape;
  shape.trained = {};
  open_added_values(folder, shape);
  if (!optimizer) return;
  require_state(folder);
  read_run_state(folder);
  const SafetensorsFile state(folder / "espalier" / "state.safetensors");
}

TunedModel::TunedModel(HostedBase& base, Hosting& hosting, const serve::TunedPart& part,
                       const std::filesystem::path& folder, bool optimizer, const serve::Pause& pause)
    : base_(base),
      hosting_(hosting),
      part_(part),
      model_(load_tuned(base, part, folder, pause)),
      optimizer_(model_->table, model_->weights, AdamWSettings{}, model_->decoder.device()) {
  if (optimizer) require_state(folder);
  if (optimizer || std::filesystem::exists(folder / "espalier" / "state.json"))
    continue_trained_model(folder, *model_, optimizer_, pause);
  if (optimizer) return;
  const Operations& ops = model_->decoder.device().operations();
  ops.zero(optimizer_.exp_avg());
  ops.zero(optimizer_.exp_avg_sq());
  optimizer_.set_steps_done(0);
}

void TunedModel::write(const std::filesystem::path& directory, bool state, const serve::Pause& pause) {
  const Running running(runs_);
  if (state)
    save_trained_model(directory, *model_, optimizer_, {}, SaveDType::source, base_.name(), pause);
  else
    write_trained_weights(directory, *model_, optimizer_, SaveDType::source, base_.name(), pause);
}

std::int64_t TunedModel::bytes_of(const HostedBase& base, const serve::TunedPart& part) {
  ModelShape shape = base.model().shape;
  shape.trained = {};
  shape = train_only(std::move(shape), TrainedChoice("all", additions_of(part, shape)));
  const DType dtype = base.model().dtype;
  // Two gradients, of the calls so far and of the one that runs; two moments; masters of weights in bfloat16.
  const std::int64_t sums = dtype == DType::bfloat16 ? 5 : 4;
  return LocalShape(shape).parameters(Parameters::trained) *
         (espalier::bytes_of(dtype) + sums * espalier::bytes_of(accumulator_of(dtype)));
}

double TunedModel::check_gradient(const DatumRollouts& data, const at::Tensor& gradient, const Options& options,
                                  CallMemory::Turns& turns) {
  Timer timer;
  Learner learner(*model_, options, hosting_.machine, turns.workspace(), &optimizer_);
  learner.on_plan = begin_planned(turns, held_beside_call(learner.held(), options.dtype));
  learner.on_share = [&](double) { turns.pause(); };
  learner.options.schedule = Schedule::dense;
  learner.options.share = ShareMode::off;
  learner.options.token_budget = hosting_.options.token_budget;
  DatumLoss loss(data.terms);
  LanguageHead head(model_->decoder, data.rollouts, turns.workspace().arena, &loss, &learner.gradients);
  run_gradient_pass(learner, data.rollouts, head, nullptr, true, timer);
  const double size = at::linalg_vector_norm(gradient, 2).item().toDouble();
  const double difference = at::linalg_vector_norm(at::sub(learner.gradients.flat(), gradient), 2).item().toDouble();
  return size > 0 ? difference / size : difference;
}

// A call has the plan that fits half the memory for calls, in waves after which others have their turn. Where there is
// none, the waves are as large as the planner wants them. One that needs more than half may use all. So a plan depends
// on the call and the server's options, not on what else the server does.
void TunedModel::run_planned(const HeldModel& held, const std::function<void(const Options&)>& pass) {
  const bool chosen = hosting_.options.token_budget == 0;
  Options options = step_options(hosting_, held, hosting_.calls.half());
  if (chosen) try {
      options.token_budget = kRowsOfTurn;
      return pass(options);
    } catch (const StepTooLarge&) {  // no row has run
      options.token_budget = 0;
    }
  try {
    return pass(options);
  } catch (const StepTooLarge&) {
  }
  options = step_options(hosting_, held, hosting_.calls.bytes());
  try {
    pass(options);
  } catch (const StepTooLarge& step) {
    refuse_too_large(step, options, hosting_);
  }
}

TunedModel::Pass TunedModel::run_backward(const DatumRollouts& data, CallMemory::Turns& turns) {
  Learner learner(*model_, hosting_.options, hosting_.machine, turns.workspace(), &optimizer_);
  learner.on_plan = begin_planned(turns, held_beside_call(learner.held(), learner.options.dtype));
  learner.on_share = [&](double) { turns.pause(); };
  DatumLoss loss(data.terms);
  LanguageHead head(model_->decoder, data.rollouts, turns.workspace().arena, &loss, &learner.gradients);
  PassReport report;
  run_planned(learner.held(), [&](const Options& options) {
    Timer timer;
    learner.options = options;
    report = run_gradient_pass(learner, data.rollouts, head, nullptr, true, timer);
  });
  Pass pass;
  for (std::size_t i = 0; i < data.rollouts.size(); ++i) {
    const auto rollout = static_cast<std::int32_t>(i);
    pass.loss.push_back(loss.loss(rollout));
    pass.clipped.push_back(loss.clipped(rollout));
    if (!std::isfinite(pass.loss.back()))
      throw InputError({data.rollouts[i].where, "a finite loss", text_of(pass.loss.back()),
                        "check its log-probs, advantages and weights for extreme values"});
  }
  if (hosting_.check_every > 0 && ++calls_ % hosting_.check_every == 0)
    pass.check = check_gradient(data, learner.gradients.flat(), learner.options, turns);
  add_gradient(learner.gradients.flat());
  pass.series = std::move(head.series());
  pass.logical_rows = report.plan.logical_rows, pass.physical_rows = report.plan.physical_rows();
  return pass;
}

TunedModel::Pass TunedModel::run_forward(const DatumRollouts& data, CallMemory::Turns& turns) {
  LanguageHead head(model_->decoder, data.rollouts, turns.workspace().arena);
  Pauses pauses(turns);
  ForwardReport report;
  const HeldModel held{model_->decoder.local(), kWeightsOnly};
  run_planned(held, [&](const Options& options) {
    report = run_forward_pass({.decoder = model_->decoder,
                               .rollouts = data.rollouts,
                               .options = options,
                               .machine = hosting_.machine,
                               .workspace = turns.workspace(),
                               .progress = pauses,
                               .task = "log-probs",
                               .on_plan = begin_planned(turns, held_beside_call(held, options.dtype))},
                              head);
  });
  DatumLoss loss(data.terms);
  Pass pass;
  pass.series = std::move(head.series());
  for (std::size_t i = 0; i < data.rollouts.size(); ++i) {
    const auto rollout = static_cast<std::int32_t>(i);
    RolloutSeries& series = pass.series[i];
    std::vector<double> unused(series.logprob.size()), unused_too(series.logprob.size());
    loss.add_rollout(rollout, series.logprob, series.entropy, unused, unused_too);
    pass.loss.push_back(loss.loss(rollout));
    pass.clipped.push_back(loss.clipped(rollout));
  }
  pass.logical_rows = report.logical_rows, pass.physical_rows = report.physical_rows;
  return pass;
}

std::vector<serve::TrainingOutcome> TunedModel::forward_backward(const std::vector<const serve::TrainingCall*>& calls,
                                                                 const serve::Pause& pause) {
  const DatumRollouts data(calls);
  const Running running(runs_);
  CallMemory::Turns turns(hosting_.calls, pause);
  base_.reserve_positions(model_->decoder, longest_of(data.rollouts));
  const Pass pass = calls.front()->backward ? run_backward(data, turns) : run_forward(data, turns);
  std::vector<serve::TrainingOutcome> outcomes;
  std::size_t next = 0;  // datum
  std::int64_t rows_before = 0;
  // Rows that ran are counted for calls in proportion to their tokens, so that their numbers add up.
  const auto computed_before = [&](std::int64_t rows) { return pass.physical_rows * rows / pass.logical_rows; };
  for (const serve::TrainingCall* call : calls) {
    serve::TrainingAnswer answer;
    double loss = 0;
    std::size_t targets = 0;
    std::int64_t clipped = 0, rows = 0;
    for (std::size_t i = 0; i < call->data.size(); ++i, ++next) {
      loss += pass.loss[next], clipped += pass.clipped[next];
      const std::vector<double>& logprob = pass.series[next].logprob;
      answer.logprobs.emplace_back(logprob.begin(), logprob.end());
      targets += logprob.size(), rows += data.rollouts[next].length();
    }
    const std::int64_t computed = computed_before(rows_before + rows) - computed_before(rows_before);
    rows_before += rows;
    answer.metrics = {{"loss:sum", loss},
                      {"tokens_computed:sum", static_cast<double>(computed)},
                      {"tokens_shared:sum", static_cast<double>(rows - computed)}};
    using serve::LossName;
    if (call->loss == LossName::ppo || call->loss == LossName::cispo || call->loss == LossName::gspo)
      answer.metrics["clip_fraction:mean"] = static_cast<double>(clipped) / static_cast<double>(targets);
    if (pass.check) answer.metrics["check_gradient_error:max"] = *pass.check;
    outcomes.push_back({std::move(answer), nullptr});
  }
  return outcomes;
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

AdamW::Update TunedModel::step(const serve::AdamParams& params, const serve::Pause& pause) {
  const Running running(runs_);
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
  const AdamW::Update update = optimizer_.step(gradient, settings, pause);
  ++model_->updates;
  return update;
}

}  // namespace espalier
