#include "espalier/loop/grpo.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "espalier/base/defined_sums.h"
#include "espalier/base/error.h"
#include "espalier/base/units.h"
#include "espalier/checkpoint/atomic_output.h"
#include "espalier/config/model_config.h"
#include "espalier/config/rope_config.h"
#include "espalier/data/training_data.h"
#include "espalier/loop/checkpoint.h"
#include "espalier/loop/random_streams.h"
#include "espalier/loop/run_start.h"
#include "espalier/loop/sampling.h"
#include "espalier/loop/teacher.h"
#include "espalier/metrics/part_progress.h"
#include "espalier/metrics/timer.h"
#include "espalier/rollout/mini_batches.h"
#include "espalier/rollout/writer.h"
#include "espalier/score/score.h"
#include "espalier/services/tracker.h"
#include "espalier/state/trained_choice.h"
#include "espalier/step/step.h"
#include "espalier/step/step_json.h"
#include "espalier/train/step_statistics.h"
#include "espalier/train/trace.h"
#include "espalier/train/trainer.h"

namespace espalier {
namespace {

constexpr std::int64_t kSamplesOfEvaluation = 3;  // recorded at least, whatever --show says

// A step has no log-probs of tokens without a loss; the record then has 0, as the sampler's.
void keep_old_logprobs(std::span<const double> logprobs, Rollout& rollout) {
  rollout.old_logprobs.assign(logprobs.begin(), logprobs.end());
  for (std::size_t t = 0; t < logprobs.size(); ++t)
    if (rollout.loss_mask[t] == 0) rollout.old_logprobs[t] = 0;
}

std::int64_t weight_bytes(const ModelState& model) {
  return static_cast<std::int64_t>(model.weights.nbytes() + model.held_weights.nbytes() +
                                   model.narrow_weights.nbytes() + model.quantised_weights.nbytes()) +
         model.mapped_table.size() * bytes_of(DType::bfloat16);
}

class Loop {
 public:
  Loop(RunStart start, const LoopParts& given, Progress& progress, const MetricLine& on_line, const Mesh& mesh)
      : folder_(*start.folder),
        start_(std::move(start)),
        options_(start_.options),
        given_(given),
        progress_(progress),
        parts_(progress),
        mesh_(mesh) {
    if (const auto step = folder_.newest_checkpoint())
      restore(folder_.checkpoint(*step), on_line);
    else
      begin(on_line);
    last_step_ = options_.steps > 0 ? options_.steps : kDefaultGrpoSteps;
  }

  GrpoReport run() {
    progress_.on_interrupt(OnInterrupt::finish);
    first_step_ = state_.step;
    parts_.begin_run("training", last_step_ - first_step_, "steps");
    prepare();
    bool nothing_left = false;
    while (state_.step < last_step_ && !nothing_left) {
      if (const int signal = signal_of_any_rank(progress_, mesh_); signal != 0) interrupt(signal);
      nothing_left = !run_batch();
    }
    if (recorder_) recorder_->finish();
    if (evaluated_at_ != state_.step) evaluate();
    if (saved_at_ != state_.step) save();
    write_model();
    progress_.end();
    if (const int signal = signal_of_any_rank(progress_, mesh_); signal != 0)
      throw Interrupted{signal, text_of("after the last step, ", state_.step)};
    return {folder_.root(), state_.step, state_.accuracy, nothing_left};
  }

 private:
  void begin(const MetricLine& on_line);
  void start_warm(const MetricLine& on_line);
  void restore(const std::filesystem::path& checkpoint, const MetricLine& on_line);
  void prepare();
  void prepare_critic();
  bool run_batch();
  SampledBatch sample();
  [[noreturn]] void interrupt(int signal);
  bool sampler_has_bits_of_training() const;
  void add_logprobs(std::vector<Rollout>& rollouts, std::int64_t steps, std::int64_t& tokens_saved);
  void run_steps(const TrainingData& data, const Json& batch);
  void evaluate();
  void open_metrics(std::int64_t bytes, std::int64_t first_step, const MetricLine& on_line);
  void write_line(const Json& line);
  void write_samples(std::span<const Answer> answers);
  void save();
  void write_last_rollouts() const;
  void write_model() const;

  const RunFolder& folder_;
  RunStart start_;
  const Options& options_;
  const LoopParts& given_;
  Progress& progress_;
  PartProgress parts_;  // of everything after the weights are there, under one bar for the run
  const Mesh& mesh_;
  std::int64_t first_step_ = 0, last_step_ = 0;

  std::unique_ptr<ModelState> model_, reference_, teacher_;
  std::unique_ptr<Decoder> own_parameters_;  // the reference where the model's own parameters do not train
  std::unique_ptr<AdamW> optimizer_;
  std::unique_ptr<RunMetrics> metrics_;  // on rank 0
  LoopState state_;

  std::optional<ScoredChoices> scored_choices_;  // of the batch, at the weights of its first step
  std::optional<Actor> actor_;
  std::optional<Critic> critic_;
  std::optional<Sampling> sampling_;
  std::optional<HeldBytes> reference_bytes_, teacher_bytes_;  // beside the learners
  std::optional<TraceRecorder> recorder_;
  std::vector<Rollout> last_rollouts_;  // of the last batch, with old log-probs
  std::vector<Answer> last_answers_;    // of the last batch, one to each prompt
  Json last_picture_;                   // of the last step's plan
  std::int64_t evaluated_at_ = -1, saved_at_ = -1;
  bool told_of_bits_ = false;
};

void Loop::open_metrics(std::int64_t bytes, std::int64_t first_step, const MetricLine& on_line) {
  if (mesh_.writes())
    metrics_ = std::make_unique<RunMetrics>(folder_.metrics(), bytes, first_step, on_line,
                                            ReportTargets::from(options_).tensorboard);
}

void Loop::write_line(const Json& line) {
  if (metrics_) metrics_->write(line);
}

// Weights as given, or fresh ones after a warm start.
void Loop::begin(const MetricLine& on_line) {
  std::filesystem::path source = options_.model;
  if (source.empty()) {
    source = folder_.fresh();
    if (mesh_.writes()) given_.tasks.write_fresh_model(source, given_.tasks.fresh_config(options_));
    mesh_.world.wait_for_all();
  }
  const DType dtype = options_.dtype;
  if (has_weights(source)) {
    model_ = load_model(source, dtype, progress_, mesh_, trained_choice(options_));
    open_metrics(0, 0, on_line);
  } else {
    require_no_additions(options_, "where --model has no weights: a fresh model trains everything",
                         "give a model with weights");
    if (options_.train != "all")
      throw OptionError({"--train", "all where --model has no weights: a fresh model trains everything",
                         "'" + options_.train + "'", "give a model with weights, or leave --train out"});
    model_ = random_model(read_model_shape(source), dtype, random_of(options_.seed, Stream::weights).key(), mesh_);
    model_->source = source;
    model_->decoder.reserve_positions(options_.prompt_length + options_.max_response_length);
    start_warm(on_line);
  }
  optimizer_ = std::make_unique<AdamW>(model_->table, model_->weights, AdamWSettings::from(options_),
                                       model_->decoder.device(), OptimizerRanks{.world = mesh_.world});
}

void Loop::start_warm(const MetricLine& on_line) {
  const auto write = [&](const WarmStartStep& step) {
    Json line{{"kind", "warm_start"},
              {"step", step.step},
              {"loss", step.loss},
              {"right", step.right},
              {"prompt_length", step.prompt_length}};
    if (step.held_out) line["held_out"] = *step.held_out;
    write_line(line);
  };
  const auto warm = given_.tasks.warm_start(*model_, options_, start_.machine);
  std::int64_t bytes = 0;
  if (is_espalier_output(folder_.warm_start())) bytes = warm->load(folder_.warm_start());
  if (warm->last().step > 0)
    progress_.note(
        text_of("continuing ", folder_.root().string(), " in its warm start, after step ", warm->last().step));
  open_metrics(bytes, warm->last().step + 1, on_line);
  progress_.on_interrupt(OnInterrupt::finish);
  if (!warm->run(progress_, write)) {
    if (mesh_.writes()) std::filesystem::create_directories(folder_.checkpoint(0).parent_path());
    warm->save(folder_.warm_start(), metrics_ ? metrics_->bytes() : 0);
    throw Interrupted{signal_of_any_rank(progress_, mesh_),
                      text_of("in the warm start, after step ", warm->last().step), folder_.root()};
  }
  const WarmStartStep& last = warm->last();
  if (!warm->learned())
    progress_.note(text_of("the warm start ended after ", last.step, " steps with ", format_percent(last.right),
                           " right answers at ", last.prompt_length, " of ", options_.prompt_length,
                           " prompt tokens; more --warm-start-steps would help"));
}

void Loop::restore(const std::filesystem::path& checkpoint, const MetricLine& on_line) {
  Restored restored = load_checkpoint(checkpoint, options_, mesh_);
  model_ = std::move(restored.model);
  optimizer_ = std::move(restored.optimizer);
  state_ = restored.state;
  if (state_.prompts != start_.questions->fingerprint())
    throw InputError({options_.prompts, "the prompts that the run was started with", "other prompts",
                      "restore --prompts and --val-prompts, or start a new run in another --out"});
  evaluated_at_ = saved_at_ = state_.step;
  open_metrics(state_.metrics_bytes, state_.step + 1, on_line);
  progress_.note(text_of("continuing ", folder_.root().string(), " after step ", state_.step));
  if (!restored.note.empty()) progress_.note(restored.note);
  if (!options_.record.empty() && state_.step > 0)
    throw OptionError({"--record", "a run from its beginning", text_of("one that continues after step ", state_.step),
                       "a trace needs every step; leave --record out, or start again in another --out"});
}

// Prepares what batches need besides the model. A run that begins is evaluated and saved first: checkpoint 0 is also
// the reference.
void Loop::prepare() {
  actor_.emplace(*model_, options_, start_.machine, &*optimizer_);
  sampling_.emplace(options_, *start_.questions, model_->decoder, models_of_loop(model_->shape, options_, mesh_),
                    actor_->workspace.arena, parts_);
  const std::int64_t longest = sampling_->longest_rollout();
  model_->decoder.reserve_positions(longest);
  for (const std::string& note :
       position_notes(model_->shape, longest, text_of("prompts and --max-response-length reach ", longest, " tokens")))
    progress_.note(note);
  optimizer_->set_last_step(last_step_);
  if (!options_.critic.empty()) prepare_critic();
  if (saved_at_ < 0) {
    evaluate();
    save();
  }
  if (options_.kl_loss_coef > 0 && keeps_own_parameters(model_->shape)) {
    own_parameters_ = decoder_without_additions(*model_);
    own_parameters_->reserve_positions(sampling_->longest_rollout());
  } else if (options_.kl_loss_coef > 0) {
    reference_ = load_checkpoint(folder_.checkpoint(0), options_, mesh_).model;
    reference_->decoder.reserve_positions(sampling_->longest_rollout());
  }
  if (reference_) reference_bytes_.emplace(actor_->workspace, weight_bytes(*reference_));
  if (!options_.teacher_model.empty()) {
    teacher_ = load_model(options_.teacher_model, options_.dtype, progress_, mesh_);
    teacher_->decoder.reserve_positions(longest);
    teacher_bytes_.emplace(actor_->workspace, weight_bytes(*teacher_));
  }
  if (!options_.record.empty()) {
    Options recorded = options_;
    if (recorded.lr_total_steps == 0) recorded.lr_total_steps = last_step_;
    recorder_.emplace(options_.record, options_.record_every, *model_, *optimizer_, recorded);
  }
}

// PPO: the critic shares the actor's workspace, for the two take turns.
void Loop::prepare_critic() {
  critic_.emplace(load_critic(*trained_critic(options_), options_, model_->shape, parts_, mesh_), options_,
                  start_.machine, actor_->workspace);
  critic_->model().decoder.reserve_positions(sampling_->longest_rollout());
  critic_->optimizer().set_last_step(last_step_);
  if (saved_at_ >= 0) restore_critic(folder_.checkpoint(saved_at_), *critic_);
}

// False where no group was left to learn from.
// Nothing changes while a batch is sampled, so an interrupt there need not wait for its end.
SampledBatch Loop::sample() {
  // With several ranks, none leaves the others alone.
  if (mesh_.world.size() == 1) progress_.on_interrupt(OnInterrupt::unwind);
  std::optional<SampledBatch> sampled;
  try {
    sampled = sampling_->batch(state_.batches, state_.prompts_drawn);
  } catch (const Interrupted&) {
  }
  progress_.on_interrupt(OnInterrupt::finish);
  if (!sampled) interrupt(progress_.interrupted());
  return std::move(*sampled);
}

void Loop::interrupt(int signal) {
  if (recorder_) recorder_->finish();
  if (saved_at_ != state_.step) save();
  throw Interrupted{signal, text_of("after step ", state_.step, " of ", last_step_), folder_.root()};
}

bool Loop::run_batch() {
  SampledBatch sampled = sample();
  if (sampled.rollouts.empty()) {
    progress_.note(text_of("no group with unequal rewards in ", sampled.samplings,
                           " samplings: no gradient is left, so the loop ends"));
    return false;
  }
  ++state_.batches;
  state_.prompts_drawn += sampled.prompts_drawn;
  last_answers_ = std::move(sampled.answers);
  const auto mini_batches = cut_mini_batches(sampled.rollouts, options_.mini_batch_size).size();
  const Timer scoring;
  add_logprobs(sampled.rollouts, options_.epochs * static_cast<std::int64_t>(mini_batches), sampled.tokens_saved);
  TrainingData data(std::move(sampled.rollouts), options_, critic_.has_value());
  if (critic_) data.prepare(0, [&](std::span<const Rollout> rollouts) { return critic_->values_of(rollouts, parts_); });
  const double score_seconds = scoring.total();
  Json batch;
  batch["batch"] = state_.batches;
  batch["reward"] = sampled.reward;
  batch["accuracy"] = sampled.accuracy;
  batch["length"] = {{"mean", sampled.mean_length}, {"max", sampled.longest}};
  if (sampled.mean_turns) batch["turns"] = *sampled.mean_turns;
  if (sampled.unjudged > 0) batch["unjudged"] = sampled.unjudged;
  batch["groups_dropped"] = sampled.groups_dropped;
  batch["samplings"] = sampled.samplings;
  batch["tokens_saved"] = sampled.tokens_saved;
  batch["seconds"] = {{"generate", sampled.seconds}, {"score", score_seconds}};
  batch["generated"] = sampled.generated;
  run_steps(data, batch);

  if (options_.test_freq > 0 && state_.batches % options_.test_freq == 0) evaluate();
  if (options_.save_freq > 0 && state_.batches % options_.save_freq == 0) save();
  return true;
}

// Log-probs of the sampler are then those that a pass over the rollouts would give (docs/mathematics.md, section 18).
bool Loop::sampler_has_bits_of_training() const {
  const bool composed = options_.attention != AttentionKernels::automatic && row_of(options_.attention).composed;
  return defined_sums() && options_.device == DeviceType::cpu && !composed && mesh_.tp.size() == 1;
}

// Old log-probs where the weights will have moved before they are needed, or importance weights compare them with the
// sampler's; reference log-probs where there is a KL term; a teacher's where there is one. The pass over old log-probs
// also counts the routers' choices for the first step, whose weights are the same, where its loss needs them first.
void Loop::add_logprobs(std::vector<Rollout>& rollouts, std::int64_t steps, std::int64_t& tokens_saved) {
  const auto score = [&](const Decoder& decoder, std::vector<double> Rollout::*field, moe::LoadAccounting* counts) {
    ScoredRollouts scored =
        score_rollouts(decoder, rollouts, options_, start_.machine, actor_->workspace, parts_, counts, mesh_);
    for (std::size_t i = 0; i < rollouts.size(); ++i) rollouts[i].*field = std::move(scored.series[i].logprob);
    tokens_saved += scored.logical_rows - scored.physical_rows;
  };
  scored_choices_.reset();
  // Ranks of dp count their own rollouts alone: they count again.
  const bool count = mesh_.dp.size() == 1 && model_->shape.experts > 0 && options_.router_aux_loss_coef != 0 &&
                     options_.router_aux_loss_scope == AuxScope::minibatch;
  const bool needed = steps > 1 || options_.rollout_is != RolloutCorrection::none || !options_.rollout_rs.empty();
  if (needed && !count && sampler_has_bits_of_training()) {
    if (!std::exchange(told_of_bits_, true))
      progress_.note(
          "the sampler's log-probs are bitwise those of training: they are used as old_logprobs, without another pass");
    for (Rollout& rollout : rollouts) rollout.old_logprobs = rollout.rollout_logprobs;
  } else if (needed) {
    if (count) scored_choices_.emplace(*model_, rollouts);
    score(model_->decoder, &Rollout::old_logprobs, count ? &scored_choices_->counts : nullptr);
  }
  actor_->scored = scored_choices_ ? &*scored_choices_ : nullptr;
  if (own_parameters_) score(*own_parameters_, &Rollout::ref_logprobs, nullptr);
  if (reference_) score(reference_->decoder, &Rollout::ref_logprobs, nullptr);
  if (!teacher_) return;
  require_tokens(teacher_->shape, options_, rollouts);
  score(teacher_->decoder, &Rollout::teacher_logprobs, nullptr);
}

void Loop::run_steps(const TrainingData& data, const Json& batch) {
  const std::int64_t steps = options_.epochs * data.mini_batches();
  last_rollouts_ = data.rollouts();
  std::size_t at = 0;
  parts_.begin("updating", steps, "steps");
  for (std::int64_t i = 0; i < steps; ++i) {
    const MiniBatch mini_batch = data.mini_batch(i % data.mini_batches());
    const StepReport report = run_step(*actor_, mini_batch, false, critic_ ? &*critic_ : nullptr);
    state_.step = report.step;
    const bool last_of_batch = i + 1 == steps;
    if (recorder_) recorder_->add(report, mini_batch, last_of_batch && report.step >= last_step_);
    const GradientReport& gradient = report.gradient;
    if (data.rollouts().front().old_logprobs.empty())  // then there is one step, with these weights
      for (const RolloutSeries& series : gradient.series) keep_old_logprobs(series.logprob, last_rollouts_[at++]);
    if (given_.picture) last_picture_ = given_.picture(gradient.plan, mini_batch.rollouts);

    Json line{{"kind", "step"}};
    line.update(step_json(report));
    line.update(step_statistics(report, mini_batch.rollouts, start_.machine));
    Json seconds = line["seconds"];
    line.update(batch);
    line["steps_left"] = steps - 1 - i;  // in this batch
    line["steps_total"] = std::max(last_step_, report.step);
    seconds["generate"] = i == 0 ? batch["seconds"]["generate"].get<double>() : 0.0;
    seconds["score"] = i == 0 ? batch["seconds"]["score"].get<double>() : 0.0;
    seconds["update"] = gradient.seconds.total;
    line["seconds"] = seconds;
    line["tokens_saved"] = (i == 0 ? batch["tokens_saved"].get<std::int64_t>() : 0) + gradient.plan.logical_rows -
                           gradient.trunk_rows - gradient.wave_rows;
    write_line(line);
    parts_.advance_to(i + 1);
    parts_.advance_run_to(state_.step - first_step_);
  }
  parts_.end();
}

// Without held-out prompts the samples come from the last batch.
void Loop::evaluate() {
  evaluated_at_ = state_.step;
  if (const std::optional<Evaluation> found = sampling_->evaluate()) {
    state_.accuracy = found->accuracy;
    Json line{{"kind", "evaluation"},
              {"step", state_.step},
              {"accuracy", found->accuracy},
              {"reward", found->reward},
              {"length", found->mean_length}};
    if (found->mean_turns) line["turns"] = *found->mean_turns;
    write_line(line);
    write_samples(found->answers);
  } else {
    write_samples(last_answers_);
  }
  if (!last_picture_.is_null()) write_line({{"kind", "picture"}, {"step", state_.step}, {"plan", last_picture_}});
}

void Loop::write_samples(std::span<const Answer> answers) {
  const auto samples =
      std::min(answers.size(), static_cast<std::size_t>(std::max(kSamplesOfEvaluation, options_.show)));
  for (const Answer& answer : answers.first(samples))
    write_line({{"kind", "sample"},
                {"step", state_.step},
                {"prompt", answer.prompt},
                {"response", answer.response},
                {"expected", answer.expected},
                {"reward", answer.reward ? Json(*answer.reward) : Json()}});
}

void Loop::save() {
  parts_.begin("saving", 0, "bytes");
  if (mesh_.writes()) write_last_rollouts();
  state_.metrics_bytes = metrics_ ? metrics_->bytes() : 0;
  state_.prompts = start_.questions->fingerprint();
  if (mesh_.writes()) std::filesystem::create_directories(folder_.root() / "checkpoints");
  save_checkpoint(folder_.checkpoint(state_.step), state_, *model_, *optimizer_, critic_ ? &*critic_ : nullptr,
                  options_);
  saved_at_ = state_.step;
  if (mesh_.writes()) std::filesystem::remove_all(folder_.warm_start());
  parts_.end();
}

void Loop::write_last_rollouts() const {
  if (last_rollouts_.empty()) return;
  RolloutWriter writer(folder_.last_rollouts().string());
  for (const Rollout& rollout : last_rollouts_) writer.write(rollout);
  writer.finish();
}

void Loop::write_model() const {
  std::optional<AtomicDirectory> out;
  if (mesh_.writes()) out.emplace(folder_.model());
  write_trained_weights(out ? out->path() : std::filesystem::path(), *model_, *optimizer_, options_.save_dtype);
  if (out) {
    note_changed_files(*model_, progress_);
    out->commit();
  }
}

}  // namespace

GrpoReport grpo(const Options& options, const LoopParts& parts, Progress& progress, const MetricLine& on_line,
                const Mesh& mesh) {
  std::optional<ClaimedDirectory> record;
  if (mesh.writes() && !options.record.empty()) record.emplace(options.record, options.overwrite);
  return Loop(start_run(options, parts.tasks, progress, mesh), parts, progress, on_line, mesh).run();
}

}  // namespace espalier
