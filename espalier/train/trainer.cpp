#include "espalier/train/trainer.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/base/mutation.h"
#include "espalier/checkpoint/atomic_output.h"
#include "espalier/checkpoint/model_directory.h"
#include "espalier/checkpoint/run_state.h"
#include "espalier/model/dispatch.h"
#include "espalier/observe/timer.h"
#include "espalier/options/options_json.h"
#include "espalier/train/machine.h"
#include "espalier/train/series_file.h"
#include "espalier/train/trace.h"

namespace espalier {
namespace {

DType accumulator_of(DType dtype) { return dtype == DType::float64 ? DType::float64 : DType::float32; }

// The directory that weights and other files come from: --model, else the one that is continued.
std::string source_of(const Options& options) {
  if (!options.model.empty()) return options.model;
  if (!options.resume.empty()) return options.resume;
  throw OptionError({"--model", "a Hugging Face model directory", "nothing", "give --model DIR"});
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
    std::int64_t all_tokens = 0, tokens_done = 0;
    for (std::int64_t at = position_; at < end; ++at)
      all_tokens += tokens_of(data_.mini_batch(at % data_.mini_batches()));
    progress_.begin("training", all_tokens, "tokens");
    for (; position_ < end; ++position_) {
      const bool last = position_ + 1 == end;
      const std::int64_t index = position_ % data_.mini_batches();
      const bool all_logprobs = last && !options_.logprobs.empty();
      const MiniBatch batch = data_.mini_batch(index);
      const std::int64_t tokens = tokens_of(batch);
      actor_.on_share = [&](double share) {
        progress_.advance_to(tokens_done + std::llround(share * static_cast<double>(tokens)));
      };
      StepReport report = run_step(actor_, optimizer_, batch, all_logprobs);
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
    if (!options_.gradients.empty())
      write_named_tensors(options_.gradients, model_->table, accumulator_of(model_->dtype),
                          actor_.gradients.flat().data_ptr());
    if (!options_.logprobs.empty()) write_series(options_.logprobs, data_.mini_batch(last_index_).rollouts, last_);
    if (recorder_) recorder_->finish();
    if (!out) return;
    progress_.begin("saving", 0, "bytes");
    const DType saved = options_.save_dtype == "source" ? model_->shape.stored_dtype : parse_dtype(options_.save_dtype);
    write_model_directory(out->path(), model_->source, model_->table, accumulator_of(model_->dtype),
                          optimizer_.masters().data_ptr(), saved);
    save_run_state(out->path(), state(), model_->table, optimizer_.masters().data_ptr(),
                   optimizer_.exp_avg().data_ptr(), optimizer_.exp_avg_sq().data_ptr());
    out->commit();
    progress_.end();
  }

 private:
  TrainingData read(Progress& progress) {
    const Timer timer;
    TrainingData data(read_for_model(options_.rollouts, model_->shape.vocabulary, progress), options_);
    read_seconds_ = timer.total();
    return data;
  }

  // Masters, moments and position of a former run. The position holds for the same rollouts only; on others the
  // optimizer continues and the data starts at its beginning.
  void resume() {
    at::Tensor first = optimizer_.exp_avg(), second = optimizer_.exp_avg_sq();
    if (ESPALIER_MUTATION(moments_swapped_after_resume)) std::swap(first, second);
    const RunState former =
        load_run_state(options_.resume, fingerprint_of(model_->shape), model_->table, accumulator_of(model_->dtype),
                       optimizer_.masters().data_ptr(), first.data_ptr(), second.data_ptr());
    if (ESPALIER_MUTATION(masters_rounded_after_resume))
      optimizer_.masters().copy_(optimizer_.masters().to(at::kBFloat16));
    if (!ESPALIER_MUTATION(stale_step_after_resume)) optimizer_.set_steps_done(former.step);
    if (model_->dtype == DType::bfloat16) model_->weights.copy_(optimizer_.masters());
    const Json extra = Json::parse(former.extra);
    const bool same = extra.value("rollouts", "") == data_.fingerprint();
    if (same && !ESPALIER_MUTATION(position_lost_after_resume))
      position_ = former.epoch * data_.mini_batches() + former.mini_batch;
    else
      progress_.note("--resume: other rollouts than before, so they are read from their beginning");
  }

  RunState state() const {
    RunState state;
    state.step = optimizer_.steps_done();
    state.epoch = position_ / data_.mini_batches();
    state.mini_batch = position_ % data_.mini_batches();
    state.random_state = std::to_string(options_.seed);
    state.options = options_to_json(options_, 't').dump();
    state.extra = Json{{"rollouts", data_.fingerprint()}}.dump();
    state.model = fingerprint_of(model_->shape);
    state.dtype = model_->dtype;
    state.accumulators = accumulator_of(model_->dtype);
    return state;
  }

  Options options_;
  Progress& progress_;
  std::unique_ptr<ModelState> model_;
  double read_seconds_ = 0;  // of the rollouts
  TrainingData data_;
  Actor actor_;
  AdamW optimizer_;
  std::optional<TraceRecorder> recorder_;
  std::int64_t position_ = 0;  // mini-batches of this data that were trained on, over all epochs
  std::vector<RolloutSeries> last_;
  std::int64_t last_index_ = 0;
};

}  // namespace

void train(const Options& options, Progress& progress, const std::function<void(const StepReport&)>& on_step) {
  if (!options.out.empty()) check_output_directory(options.out);
  if (!options.record.empty()) check_output_directory(options.record);
  Training training(options, progress);
  training.run(on_step);
  training.write();
}

}  // namespace espalier
