#include "espalier/train/trainer.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/base/mutation.h"
#include "espalier/checkpoint/atomic_output.h"
#include "espalier/checkpoint/model_directory.h"
#include "espalier/measure/machine.h"
#include "espalier/observe/timer.h"
#include "espalier/options/options_json.h"
#include "espalier/step/planning.h"
#include "espalier/train/series_file.h"
#include "espalier/train/trace.h"
#include "espalier/train/trained_model.h"
#include "espalier/train/training_data.h"
#include "espalier/train/values_file.h"

namespace espalier {
namespace {

// The directory that weights and other files come from: --model, else the one that is continued.
std::string source_of(const Options& options) {
  if (!options.model.empty()) return options.model;
  if (!options.resume.empty()) return options.resume;
  throw OptionError({"--model", "a Hugging Face model directory", "nothing", "give --model DIR"});
}

std::string critic_folder(const std::string& directory) {
  return (std::filesystem::path(directory) / "critic").string();
}

// The critic's: --critic, else that of the directory that is continued; empty: there is none.
std::string critic_source_of(const Options& options) {
  if (!options.critic.empty() || options.resume.empty()) return options.critic;
  const std::string former = critic_folder(options.resume);
  return std::filesystem::exists(former) ? former : "";
}

// Actor and critic, both with gradients and moments, before either is read.
void check_room(const Options& options) {
  StepKind kind;
  if (const std::string critic = critic_source_of(options); !critic.empty())
    kind.beside_bytes = bytes_of_model(read_critic_shape(critic).shape, options, kind);
  require_room(read_model_shape(source_of(options)), options, kind);
}

std::int64_t tokens_of(const MiniBatch& batch) {
  std::int64_t tokens = 0;
  for (const Rollout& rollout : batch.rollouts) tokens += rollout.length();
  return tokens;
}

// Everything of a run between reading and writing.
class Training {
 public:
  Training(const Options& options, Progress& progress)
      : options_(options),
        progress_(progress),
        model_(load_model(source_of(options), parse_dtype(options.dtype), progress)),
        data_(read(progress)),
        actor_(*model_, options, machine_profile(options, progress)),
        optimizer_(model_->table, model_->weights, AdamWSettings::from(options)) {
    model_->decoder.reserve_positions(data_.longest());
    if (const std::string note = data_.mini_batch_note(); !note.empty()) progress.note("note: " + note);
    if (const std::string critic = critic_source_of(options); !critic.empty()) load_critic_of(critic, actor_.machine);
    if (!options.resume.empty()) resume();
  }

  void run(const std::function<void(const StepReport&)>& on_step) {
    const std::int64_t all = options_.epochs * data_.mini_batches();
    const std::int64_t end = options_.steps == 0 ? all : std::min(options_.steps, all);
    if (position_ >= end)
      throw OptionError({"--steps", text_of("more than the ", position_, " steps that were done on these rollouts"),
                         text_of(end), "raise --steps or --epochs, or give other --rollouts"});
    if (!options_.record.empty())
      recorder_.emplace(options_.record, options_.record_every, *model_, optimizer_.masters(), options_);
    if (!data_.has_steps()) prepare(0, progress_);
    std::int64_t all_tokens = 0, tokens_done = 0;
    for (std::int64_t at = position_; at < end; ++at)
      all_tokens += tokens_of(data_.mini_batch(at % data_.mini_batches()));
    progress_.begin("training", all_tokens, "tokens");
    for (; position_ < end; ++position_) {
      const bool last = position_ + 1 == end;
      const std::int64_t index = position_ % data_.mini_batches();
      const bool all_logprobs = last && !options_.logprobs.empty();
      NoProgress silent;  // a part of the task that is shown
      prepare(index, silent);
      const MiniBatch batch = data_.mini_batch(index);
      const std::int64_t tokens = tokens_of(batch);
      StepReport report = step(batch, all_logprobs, [&](double share) {
        progress_.advance_to(tokens_done + std::llround(share * static_cast<double>(tokens)));
      });
      progress_.advance_to(tokens_done += tokens);
      if (report.gradient.profile) report.gradient.profile->read = std::exchange(read_seconds_, 0.0);
      on_step(report);
      if (recorder_) recorder_->add(report, batch, optimizer_.masters(), last);
      if (last) last_ = std::move(report.gradient.series), last_index_ = index;
    }
    progress_.end();
  }

  void write() {
    std::optional<AtomicDirectory> out;
    if (!options_.out.empty()) out.emplace(options_.out);
    if (!options_.gradients.empty()) write_gradients();
    if (!options_.logprobs.empty()) write_series(options_.logprobs, data_.mini_batch(last_index_).rollouts, last_);
    if (recorder_) recorder_->finish();
    if (!out) return;
    progress_.begin("saving", 0, "bytes");
    save_trained_model(out->path(), *model_, optimizer_, state(), options_.save_dtype);
    if (critic_) {
      const std::filesystem::path folder = critic_folder(out->path().string());
      save_trained_model(folder, critic_->model(), critic_->optimizer(), state(), options_.save_dtype);
      if (!data_.has_steps()) save_values(folder, data_.values());
    }
    out->commit();
    progress_.end();
  }

 private:
  TrainingData read(Progress& progress) {
    const Timer timer;
    TrainingData data(read_for_model(options_.rollouts, model_->shape, progress), options_,
                      !critic_source_of(options_).empty());
    read_seconds_ = timer.total();
    return data;
  }

  // Masters, moments and position of a former run, the critic's too. The position holds for the same rollouts only; on
  // others the optimizers continue and the data starts at its beginning.
  void resume() {
    const RunState former = continue_trained_model(options_.resume, *model_, optimizer_);
    if (critic_) continue_trained_model(critic_folder(options_.resume), critic_->model(), critic_->optimizer());
    const Json extra = Json::parse(former.extra);
    const bool same = extra.value("rollouts", "") == data_.fingerprint();
    if (same) check_mini_batches(former);
    if (same && !ESPALIER_MUTATION(position_lost_after_resume))
      position_ = former.epoch * data_.mini_batches() + former.mini_batch;
    else
      progress_.note("--resume: other rollouts than before, or cut otherwise, so they are read from their beginning");
    if (same && critic_ && !data_.has_steps() && !data_.restore_values(load_values(critic_folder(options_.resume))))
      throw InputError({critic_folder(options_.resume), "a value of every response token", "another number of them",
                        "The checkpoint is damaged; continue from another one"});
  }

  // The position counts mini-batches: inside an epoch it means something for mini-batches of the same size only.
  void check_mini_batches(const RunState& former) const {
    if (data_.has_steps() || former.mini_batch == 0) return;
    const std::int64_t size = Json::parse(former.options).value("mini_batch_size", options_.mini_batch_size);
    if (size != options_.mini_batch_size)
      throw OptionError({"--mini-batch-size", text_of(size, ", as before: ", options_.resume, " ends inside an epoch"),
                         text_of(options_.mini_batch_size), "leave it out to continue with that of the former run"});
  }

  void load_critic_of(const std::string& directory, const MachineProfile& machine) {
    critic_.emplace(load_critic(directory, options_, model_->shape, progress_), options_, machine, actor_.arena);
    critic_->model().decoder.reserve_positions(data_.longest());
    critic_->optimizer();
    actor_.has_optimizer = true;
    actor_.beside_bytes = critic_->learner().held_bytes();
    critic_->learner().beside_bytes = actor_.held_bytes();
  }

  void prepare(std::int64_t index, Progress& progress) {
    if (critic_)
      data_.prepare(index, [&](std::span<const Rollout> rollouts) { return critic_->values_of(rollouts, progress); });
  }

  // The critic first, as in verl: its values and targets are older than both updates.
  StepReport step(const MiniBatch& batch, bool all_logprobs, const std::function<void(double share)>& on_share) {
    const double before = critic_ ? 0.5 : 0;  // of the step's rows
    actor_.on_share = [&](double share) { on_share(before + share * (1 - before)); };
    std::optional<CriticReport> report;
    if (critic_) {
      critic_->learner().on_share = [&](double share) { on_share(before * share); };
      report = critic_->update(batch);
    }
    StepReport out = run_step(actor_, optimizer_, batch, all_logprobs);
    out.critic = std::move(report);
    return out;
  }

  void write_gradients() {
    const DType sums = accumulator_of(model_->dtype);
    const NamedTensors actor{"", model_->table, actor_.gradients.flat().data_ptr()};
    if (critic_)
      write_named_tensors(options_.gradients,
                          {actor, {"critic.", critic_->model().table, critic_->gradients().flat().data_ptr()}}, sums);
    else
      write_named_tensors(options_.gradients, {actor}, sums);
  }

  RunState state() const {
    RunState state;
    state.epoch = position_ / data_.mini_batches();
    state.mini_batch = position_ % data_.mini_batches();
    state.random_state = std::to_string(options_.seed);
    state.options = options_to_json(options_, 't').dump();
    state.extra = Json{{"rollouts", data_.fingerprint()}}.dump();
    return state;
  }

  Options options_;
  Progress& progress_;
  std::unique_ptr<ModelState> model_;
  double read_seconds_ = 0;  // of the rollouts
  TrainingData data_;
  Actor actor_;
  AdamW optimizer_;
  std::optional<Critic> critic_;
  std::optional<TraceRecorder> recorder_;
  std::int64_t position_ = 0;  // mini-batches of this data that were trained on, over all epochs
  std::vector<RolloutSeries> last_;
  std::int64_t last_index_ = 0;
};

}  // namespace

void train(const Options& options, Progress& progress, const std::function<void(const StepReport&)>& on_step) {
  if (!options.out.empty()) check_output_directory(options.out);
  if (!options.record.empty()) check_output_directory(options.record);
  check_room(options);
  Training training(options, progress);
  training.run(on_step);
  training.write();
}

}  // namespace espalier
