#include "espalier/train/trainer.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>
#include <utility>
#include <vector>

#include "espalier/base/atomic_file.h"
#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/checkpoint/added_values.h"
#include "espalier/checkpoint/atomic_output.h"
#include "espalier/checkpoint/model_directory.h"
#include "espalier/config/model_config.h"
#include "espalier/data/training_data.h"
#include "espalier/device/host_values.h"
#include "espalier/measure/machine.h"
#include "espalier/metrics/timer.h"
#include "espalier/options/options_json.h"
#include "espalier/parallel/agreement.h"
#include "espalier/score/score.h"
#include "espalier/score/series_file.h"
#include "espalier/shape/trained_parameters.h"
#include "espalier/state/held_models.h"
#include "espalier/state/planning.h"
#include "espalier/state/trained_choice.h"
#include "espalier/step/reward_step.h"
#include "espalier/train/padding_note.h"
#include "espalier/train/pair_training.h"
#include "espalier/train/rollout_metrics.h"
#include "espalier/train/trace.h"
#include "espalier/train/train_record.h"
#include "espalier/train/trained_model.h"
#include "espalier/train/values_file.h"

namespace espalier {
namespace {

// The directory that weights and other files come from: --model, else the one that is continued.
std::string source_of(const Options& options) {
  if (std::string source = model_source(options); !source.empty()) return source;
  throw OptionError({"--model", "a Hugging Face model directory", "nothing", "give --model DIR"});
}

std::string critic_folder(const std::string& directory) {
  return (std::filesystem::path(directory) / "critic").string();
}

bool is_same(const std::string& a, const std::string& b) {
  std::error_code absent;
  return std::filesystem::equivalent(a, b, absent);
}

ModelShape trained_shape_of(const Options& options) {
  return read_trained_shape(source_of(options), trained_choice(options));
}

// Actor and critic, both with gradients and moments.
std::vector<HeldModel> held_models(const Options& options, const Mesh& mesh) {
  const HeldState state{.optimizer_shares = optimizer_ranks(options, mesh).shares.size()};
  std::vector<HeldModel> held{{local_shape(trained_shape_of(options), mesh), state}};
  if (const auto critic = trained_critic(options))
    held.push_back({local_shape(read_critic_shape(*critic), mesh), state});
  return held;
}

// Checks for what is known before the first step; records and log-probs are small beside it.
void check_disk_space(const Options& options) {
  const ModelShape shape = trained_shape_of(options);
  const std::int64_t accumulator_bytes =
      LocalShape(shape).parameters(Parameters::trained) * bytes_of(accumulator_of(options.dtype));
  std::int64_t model = bytes_of_saved_model(shape, source_of(options), options);
  if (const auto critic = trained_critic(options))
    model += bytes_of_saved_model(read_critic_shape(*critic), critic->source, options);
  std::vector<ExpectedOutput> outputs;
  if (!options.out.empty()) outputs.push_back({options.out, model});
  const std::int64_t all_weights = shape.parameters() * bytes_of(accumulator_of(options.dtype));
  if (!options.record.empty())
    outputs.push_back({options.record, all_weights + accumulator_bytes});  // the first weights and the last
  if (!options.gradients.empty()) outputs.push_back({options.gradients, accumulator_bytes});
  require_disk_space(outputs);
}

void check_train_options(const Options& options) {
  if (options.save_freq > 0 && options.out.empty())
    throw OptionError({"--save-freq", "--out with it, where checkpoints are kept", "none", "give --out DIR"});
}

std::int64_t tokens_of(const MiniBatch& mini_batch) {
  std::int64_t tokens = 0;
  for (const Rollout& rollout : mini_batch.rollouts) tokens += rollout.length();
  return tokens;
}

// Everything of a run between reading and writing.
class Training {
 public:
  Training(const Options& options, Progress& progress, const Mesh& mesh)
      : options_(options),
        progress_(progress),
        mesh_(mesh),
        data_(read(progress)),
        machine_(machine_profile(options, progress, mesh)),
        model_(load_checked()),
        optimizer_(model_->table, model_->weights, AdamWSettings::from(options), model_->decoder.device(),
                   optimizer_ranks(options, mesh)),
        actor_(*model_, options, machine_, &optimizer_) {
    model_->decoder.reserve_positions(data_.longest());
    for (const std::string& note : data_.notes()) progress.note("note: " + note);
    if (const std::string note = note_on_files(model_->shape); !note.empty() && !options.out.empty())
      progress.note(note);
    if (options.objective == ObjectiveKind::reward && !options.out.empty())
      if (const std::string note = padding_note(source_of(options)); !note.empty()) progress.note(note);
    if (const auto critic = trained_critic(options)) load_critic_of(*critic);
    if (!options.resume.empty()) resume();
    if (options.objective == ObjectiveKind::dpo) take_reference();
    require_same_start();
  }

  void run(const TrainStep& on_step) {
    const std::int64_t all = options_.epochs * data_.mini_batches();
    const std::int64_t end = options_.steps == 0 ? all : std::min(options_.steps, all);
    if (position_ >= end)
      throw OptionError({split_paths(options_.rollouts).front(),
                         text_of("more than the ", position_, " steps that were already done on these rollouts"),
                         text_of(end, " steps, by --steps and --epochs"),
                         "raise --steps or --epochs, or give other --rollouts"});
    const std::int64_t steps_total = optimizer_.steps_done() + end - position_;
    optimizer_.set_last_step(steps_total);
    if (critic_) critic_->optimizer().set_last_step(steps_total);
    if (!options_.record.empty()) {
      Options recorded = options_;
      if (recorded.lr_total_steps == 0) recorded.lr_total_steps = steps_total;
      recorder_.emplace(options_.record, options_.record_every, *model_, optimizer_, recorded);
    }
    if (mesh_.writes() && !options_.rollout_metrics.empty())
      rollout_metrics_.emplace(options_.rollout_metrics, options_);
    record_.emplace(options_.resume, optimizer_.steps_done());
    if (!data_.has_steps()) prepare(0, progress_);
    std::int64_t all_tokens = 0, tokens_done = 0;
    for (std::int64_t at = position_; at < end; ++at)
      all_tokens += tokens_of(data_.mini_batch(at % data_.mini_batches()));
    progress_.begin("training", all_tokens, "tokens");
    if (!options_.out.empty()) progress_.on_interrupt(OnInterrupt::finish);
    while (position_ < end) {
      const bool last = position_ + 1 == end;
      const std::int64_t index = position_ % data_.mini_batches();
      const bool all_logprobs = last && !options_.logprobs.empty();
      NoProgress silent;  // a part of the task that is shown
      prepare(index, silent);
      MiniBatch mini_batch = data_.mini_batch(index);
      std::optional<LinearPairs> linear;
      if (pairs_) {
        linear = pairs_->linear(mini_batch, logprobs_of(model_->decoder));
        mini_batch.advantages = linear->advantages;
      }
      const std::int64_t tokens = tokens_of(mini_batch);
      const auto on_share = [&](double share) {
        progress_.advance_to(tokens_done + std::llround(share * static_cast<double>(tokens)));
      };
      StepReport report = options_.objective == ObjectiveKind::reward
                              ? run_reward_step(actor_, mini_batch, on_share)
                              : run_step(actor_, mini_batch, all_logprobs, critic_ ? &*critic_ : nullptr, on_share);
      progress_.advance_to(tokens_done += tokens);
      if (linear) add_means(report, linear->means);
      if (report.gradient.profile) report.gradient.profile->read = std::exchange(read_seconds_, 0.0);
      on_step(report, record_->add(report, mini_batch, steps_total, machine_));
      ++position_;
      const int signal = options_.out.empty() ? 0 : signal_of_any_rank(progress_, mesh_);
      if (rollout_metrics_) rollout_metrics_->add(report.step, mini_batch, report.gradient.series);
      if (recorder_) recorder_->add(report, mini_batch, last || signal != 0);
      if (last) last_ = std::move(report.gradient.series), last_index_ = index;
      if (!last && signal != 0) interrupt(signal, end);
      if (!last && options_.save_freq > 0 && report.step % options_.save_freq == 0) save();
    }
    progress_.end();
  }

  void write() {
    if (!options_.gradients.empty()) write_gradients();
    if (mesh_.writes() && !options_.logprobs.empty())
      write_series(options_.logprobs, data_.mini_batch(last_index_).rollouts, last_);
    if (recorder_) recorder_->finish();
    if (rollout_metrics_) rollout_metrics_->finish();
    if (!options_.out.empty()) save();
    mesh_.world.wait_for_all();  // what one rank could not write has not been done by any
    if (const int signal = options_.out.empty() ? 0 : signal_of_any_rank(progress_, mesh_); signal != 0)
      throw Interrupted{signal, text_of("after the last step, ", position_)};
  }

 private:
  // Forward alone, prompts shared, on all ranks together.
  LogprobFunction logprobs_of(const Decoder& decoder) {
    return [this, &decoder](std::span<const Rollout> rollouts) {
      NoProgress silent;  // a part of the task that is shown
      ScoredRollouts scored =
          score_rollouts(decoder, rollouts, options_, machine_, actor_.workspace, silent, nullptr, mesh_);
      TokenSeries series;
      for (RolloutSeries& each : scored.series) series.push_back(std::move(each.logprob));
      return series;
    };
  }

  // Records, --ref-model, or the weights that the run begins with.
  void take_reference() {
    pairs_.emplace(options_);
    if (!pairs_->needs_reference(data_.rollouts())) return pairs_->take_reference(data_.rollouts(), {});
    if (options_.ref_model.empty() && !options_.resume.empty())
      throw OptionError({"--ref-model",
                         text_of("the model that ", options_.resume, " began from, the reference of --objective dpo"),
                         "nothing", "give --ref-model DIR, or records with ref_chosen_logps and ref_rejected_logps"});
    progress_.note(options_.ref_model.empty() ? "the reference is the model before the first step"
                                              : "the reference is " + options_.ref_model);
    if (options_.ref_model.empty()) return pairs_->take_reference(data_.rollouts(), logprobs_of(model_->decoder));
    const auto reference = load_model(options_.ref_model, options_.dtype, progress_, mesh_);
    if (reference->shape.vocabulary < model_->shape.vocabulary)
      throw InputError({options_.ref_model, text_of("a vocabulary of at least ", model_->shape.vocabulary),
                        text_of(reference->shape.vocabulary), "give the reference of this model"});
    reference->decoder.reserve_positions(data_.longest());
    pairs_->take_reference(data_.rollouts(), logprobs_of(reference->decoder));
  }

  // TRL's names. The loss that the pass gives is its linear form; the reported one is that of the pairs.
  static void add_means(StepReport& report, const PairMeans& means) {
    LossParts& loss = report.gradient.loss;
    loss.loss += means.loss - loss.pg_loss;
    loss.pg_loss = means.loss;
    report.means = {{"rewards/chosen", means.reward.chosen}, {"rewards/rejected", means.reward.rejected},
                    {"rewards/accuracies", means.accuracy},  {"rewards/margins", means.margin},
                    {"logps/chosen", means.logprob.chosen},  {"logps/rejected", means.logprob.rejected}};
  }

  // Saves the state after the steps done so far: the run continues from it.
  void save() {
    progress_.begin("saving", 0, "bytes");
    std::optional<AtomicDirectory> out;
    if (mesh_.writes()) out.emplace(options_.out);
    if (mesh_.world.size() > 1) give_back_memory();
    const std::filesystem::path folder = out ? out->path() : std::filesystem::path();
    save_trained_model(folder, *model_, optimizer_, state(), options_.save_dtype);
    if (critic_)
      save_trained_model(critic_folder(folder.string()), critic_->model(), critic_->optimizer(), state(),
                         options_.save_dtype);
    if (out) {
      record_->write(folder, options_, model_->shape, machine_);
      if (critic_) save_values(critic_folder(folder.string()), data_.values());
      note_changed_files(*model_, progress_);
      out->commit();
    }
    progress_.end();
  }

  // For tensors that are brought together: what steps needed, since none follows.
  void give_back_memory() {
    actor_.workspace.arena.trim();
    Device& device = model_->decoder.device();
    if (!device.in_host_memory()) return;
    const auto give_back = [&](const at::Tensor& gradients) {
      device.give_back(static_cast<std::byte*>(host_bytes(gradients)), static_cast<std::int64_t>(gradients.nbytes()));
    };
    give_back(actor_.gradients.flat());
    if (critic_) give_back(critic_->gradients().flat());
  }

  [[noreturn]] void interrupt(int signal, std::int64_t end) {
    if (recorder_) recorder_->finish();
    if (rollout_metrics_) rollout_metrics_->finish();
    save();
    mesh_.world.wait_for_all();
    throw Interrupted{signal, text_of("after step ", position_, " of ", end), options_.out};
  }

  TrainingData read(Progress& progress) {
    const Timer timer;
    TrainingData data(read_for_model(options_.rollouts, trained_shape_of(options_), progress,
                                     record_use_of(options_, text_rows_of(options_))),
                      options_, !critic_directory(options_).empty());
    read_seconds_ = timer.total();
    return data;
  }

  // The model, once it is known that all steps fit. Where a run continues is not known yet.
  std::unique_ptr<ModelState> load_checked() {
    const std::vector<HeldModel> held = held_models(options_, mesh_);
    const bool few = options_.steps > 0 && options_.resume.empty();
    const std::int64_t steps = few ? std::min(options_.steps, data_.mini_batches()) : data_.mini_batches();
    StepsFit fit;
    for (std::int64_t index = 0; index < steps; ++index)
      fit.add(held, options_, machine_, data_.mini_batch(index).rollouts, false, mesh_);
    fit.require();
    return load_model(source_of(options_), options_.dtype, progress_, mesh_, trained_choice(options_));
  }

  // Masters, moments and position of a former run, the critic's too. The position holds for the same rollouts only; on
  // others the optimizers continue and the data starts at its beginning.
  void resume() {
    const RunState former = continue_trained_model(options_.resume, *model_, optimizer_);
    if (critic_) continue_trained_model(critic_folder(options_.resume), critic_->model(), critic_->optimizer());
    if (const std::string other = other_sum_order(former, *model_); !other.empty()) progress_.note(other);
    const Json extra = Json::parse(former.extra);
    const bool same_tokens = extra.value("rollouts", "") == data_.fingerprint();
    const std::string differing = same_tokens ? differing_fields(extra.value("fields", Json::object())) : "";
    const bool same = same_tokens && differing.empty();
    if (same) check_mini_batches(former);
    if (same)
      position_ = former.epoch * data_.mini_batches() + former.mini_batch;
    else if (same_tokens)
      progress_.note(text_of(split_paths(options_.rollouts).front(), ": the same tokens as before, but other ",
                             differing, ": the file is read from its beginning"));
    else
      progress_.note(
          "--resume: the rollouts, or their mini-batches, differ from before: they are read from their beginning");
    if (same && critic_ && !data_.restore_values(load_values(critic_folder(options_.resume))))
      throw InputError({critic_folder(options_.resume), "a value of every response token", "another number of values",
                        "The checkpoint is damaged; continue from another one"});
  }

  // Ranks that began with other records, weights or moments would train on the sum of different things.
  void require_same_start() {
    if (mesh_.world.size() == 1) return;
    Fingerprint data, weights;
    data.add(data_.fingerprint());
    for (const auto& [name, fingerprint] : data_.field_fingerprints()) data.add(fingerprint);
    data.add_number(position_);
    require_same(mesh_.world, split_paths(options_.rollouts).front(), data.value(), "give every rank the same files");
    weights.add_number(optimizer_.steps_done());
    require_same(mesh_.world, source_of(options_), weights.value(), "give every rank the same model directory");
    require_same_weights(*model_, source_of(options_));
    if (critic_) require_same_weights(critic_->model(), critic_directory(options_));
  }

  // Compares the weights that several ranks hold whole and alike; sharded and different parts cannot be compared.
  static void require_same_weights(const ModelState& model, const std::string& where) {
    const Mesh& mesh = model.mesh;
    Fingerprint everywhere, of_replicas, of_experts;
    const auto add_bytes = [&](const Parameter& p, const void* values, std::size_t bytes) {
      const bool sharded = p.shard.of_expert && mesh.degrees.ep > 1;
      (sharded                            ? of_experts
       : p.shard.copies == mesh.tp.size() ? everywhere
                                          : of_replicas)
          .add({static_cast<const char*>(values), bytes});
    };
    const auto add = [&](const ParameterTable& table, const at::Tensor& weights) {
      const at::Tensor host = model.decoder.device().to_host(weights);
      for (const Parameter& p : table.parameters()) {
        const Kept kept = table.kept(p);
        const at::Tensor values = host.narrow(0, kept.place, kept.count);
        add_bytes(p, host_bytes(values), values.nbytes());
      }
    };
    add(model.table, model.weights);
    add(model.held_table, model.held_weights);
    add(model.narrow_table, model.narrow_weights);
    add(model.quantised_table, model.quantised_weights);
    for (const Parameter& p : model.mapped_table.parameters())
      add_bytes(p, model.mapped->values(p.name), static_cast<std::size_t>(p.count * bytes_of(DType::bfloat16)));
    const std::string remedy = "give every rank the same model directory";
    require_same(mesh.tp, where, everywhere.value(), remedy);
    if (model.table.sharded()) return;
    of_replicas.add_number(everywhere.value());
    require_same(mesh.replicas, where, of_replicas.value(), remedy);
    require_same(mesh.expert_replicas, where, of_experts.value(), remedy);
  }

  // "reward, values": what the file had in other numbers when the former run read it.
  std::string differing_fields(const Json& former) const {
    std::string out;
    for (const auto& [name, fingerprint] : data_.field_fingerprints())
      if (former.value(name, fingerprint) != fingerprint) out += (out.empty() ? "" : ", ") + name;
    return out;
  }

  // The position counts mini-batches: inside an epoch it means something for mini-batches of the same size only.
  void check_mini_batches(const RunState& former) const {
    if (data_.has_steps() || former.mini_batch == 0) return;
    const std::int64_t size = Json::parse(former.options).value("mini_batch_size", options_.mini_batch_size);
    if (size != options_.mini_batch_size)
      throw OptionError({"--mini-batch-size", text_of(size, ", because ", options_.resume, " ends inside an epoch"),
                         text_of(options_.mini_batch_size), "leave it out to continue with the former run's value"});
  }

  void load_critic_of(const CriticChoice& choice) {
    critic_.emplace(load_critic(choice, options_, model_->shape, progress_, mesh_), options_, machine_,
                    actor_.workspace);
    critic_->model().decoder.reserve_positions(data_.longest());
    critic_->optimizer();
  }

  void prepare(std::int64_t index, Progress& progress) {
    if (critic_)
      data_.prepare(index, [&](std::span<const Rollout> rollouts) { return critic_->values_of(rollouts, progress); });
  }

  void write_gradients() {
    const WholeValues actor(*model_), critic(critic_ ? critic_->model() : *model_);
    constexpr AddedNames kNames = AddedNames::of_files;
    std::vector<NamedTensors> models{
        {prefix_of_files(model_->shape), actor.table(), actor.of(actor_.gradients.flat()), kNames}};
    if (critic_)
      models.push_back({"critic." + prefix_of_files(critic_->model().shape), critic.table(),
                        critic.of(critic_->gradients().flat()), kNames});
    if (mesh_.writes()) return write_named_tensors(options_.gradients, models, accumulator_of(model_->dtype));
    for (const NamedTensors& model : models)
      for (const Parameter& parameter : model.table.parameters()) model.values(parameter);
  }

  RunState state() const {
    RunState state;
    state.epoch = position_ / data_.mini_batches();
    state.mini_batch = position_ % data_.mini_batches();
    state.random_state = std::to_string(options_.seed);
    state.options = options_to_json(options_, 't').dump();
    state.extra =
        Json{{"rollouts", data_.fingerprint()}, {"fields", data_.field_fingerprints()}, {"run", mesh_.run}}.dump();
    return state;
  }

  Options options_;
  Progress& progress_;
  const Mesh& mesh_;
  double read_seconds_ = 0;  // of the rollouts
  TrainingData data_;
  MachineProfile machine_;
  std::unique_ptr<ModelState> model_;
  AdamW optimizer_;
  Actor actor_;
  std::optional<Critic> critic_;
  std::optional<PairTraining> pairs_;  // with --objective dpo
  std::optional<TraceRecorder> recorder_;
  std::optional<TrainRecord> record_;
  std::optional<RolloutMetrics> rollout_metrics_;
  std::int64_t position_ = 0;  // mini-batches of this data that were trained on, over all epochs
  std::vector<RolloutSeries> last_;
  std::int64_t last_index_ = 0;
};

}  // namespace

int signal_of_any_rank(const Progress& progress, const Mesh& mesh) {
  return static_cast<int>(maxima_over_ranks(mesh.world, {static_cast<double>(progress.interrupted())}).front());
}

void train(const Options& options, Progress& progress, const TrainStep& on_step, const Mesh& mesh) {
  std::optional<ClaimedDirectory> out, record;
  if (mesh.writes() && !options.out.empty())
    out.emplace(options.out, options.overwrite || is_same(options.out, options.resume));
  if (mesh.writes() && !options.record.empty()) record.emplace(options.record, options.overwrite);
  check_train_options(options);
  if (mesh.writes()) check_disk_space(options);
  Training training(options, progress, mesh);
  training.run(on_step);
  training.write();
}

}  // namespace espalier
