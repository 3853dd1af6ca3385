// Recorded rollouts made ready for updates: advantages computed, mini-batches cut, each a contiguous range.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "espalier/metrics/progress.h"
#include "espalier/options/options.h"
#include "espalier/rollout/reader.h"
#include "espalier/rollout/rollout.h"
#include "espalier/shape/model_shape.h"
#include "espalier/step/mini_batch.h"

namespace espalier {

// Values of all response tokens under the critic as it is now.
using ValueFunction = std::function<TokenSeries(std::span<const Rollout>)>;

class TrainingData {
 public:
  // Advantages are computed over the whole file, or over the records of one `step`, before mini-batches are cut; with a
  // critic prepare() computes them. Errors: as require_series, cut_mini_batches, settle_turn_rewards and
  // compute_advantages; InputError for pairs or lists without the objective that takes them, and the other way round.
  TrainingData(std::vector<Rollout> rollouts, const Options& options, bool with_critic = false);

  // With a critic, before mini_batch(index) is trained on: gives rollouts without recorded `values` the critic's, then
  // computes advantages and targets, for the records of its step if records have steps, else for the whole file. Later
  // calls for the same records do nothing: values from before the first update on them hold for all epochs.
  void prepare(std::int64_t index, const ValueFunction& values_of);

  std::int64_t mini_batches() const { return static_cast<std::int64_t>(begins_.size()) - 1; }
  MiniBatch mini_batch(std::int64_t index) const;
  const std::vector<Rollout>& rollouts() const { return rollouts_; }  // in mini-batch order; `index` has the file's
  std::int32_t longest() const;                                       // tokens of the longest rollout
  bool has_steps() const { return !rollouts_.empty() && rollouts_.front().step.has_value(); }

  // For the user: how the rewards of turns were read, mini-batches of another size than --mini-batch-size, and fields
  // of pairs and lists that the objective does not use.
  const std::vector<std::string>& notes() const { return notes_; }

  // Values of the whole file end to end, NaN where none are known yet, for a run that continues; restore_values takes
  // them back.
  std::vector<double> values() const;
  bool restore_values(std::span<const double> values);  // false: nothing was done, response tokens differ in number

  // A hash of the file's tokens, their order and recorded experts: a resumed run keeps its position if it is equal.
  std::string fingerprint() const;
  // The same for everything else that an update depends on, by field, as the file had it.
  const std::map<std::string, std::string>& field_fingerprints() const { return fields_; }

 private:
  Options options_;
  std::vector<Rollout> rollouts_;
  std::vector<std::vector<double>> advantages_, targets_;
  std::vector<std::uint8_t> values_are_recorded_;  // with a critic, one per rollout
  std::vector<std::size_t> begins_;
  std::map<std::string, std::string> fields_;
  std::vector<std::uint8_t> prepared_;  // with a critic, one per step; without steps the first stands for all
  std::vector<std::string> notes_;
};

// The hash behind TrainingData::fingerprint, as hexadecimal text.
std::string fingerprint_of(std::span<const Rollout> rollouts);

// Errors: UnsupportedError, with `where`, for a token that stands for an image or a video.
void refuse_image_tokens(std::span<const std::int32_t> ids, const std::string& where, const ModelShape& shape);

// Remarks on rollouts that are longer than the model's positions, or than those that short_factor of longrope serves.
std::vector<std::string> position_notes(std::span<const Rollout> rollouts, const ModelShape& shape);

// How records are read for a model.
struct RecordUse {
  double temperature = 1;  // of records that do not say theirs
  KeptSetsUse kept_sets = KeptSetsUse::automatic;
  TextRows rows = {};  // how rows of text are read
};
RecordUse record_use_of(const Options& options, const TextRows& rows = {});

// Parts of records that reading for a model changes, as they came, one entry for each record.
struct AsRead {
  std::vector<RecordedExperts> experts;  // before they are fitted to the model
  std::vector<KeptSets> kept_sets;       // that are ignored; empty: none are

  void give_back(std::size_t index, Rollout& rollout);
};

// Reads `paths` as --rollouts names them, checking ids and recorded experts against the model; remarks go to progress.
// `as_read` may be null. Errors: as read_rollouts, fit_recorded_experts and refuse_image_tokens; OptionError for
// a temperature that is not above 0.
std::vector<Rollout> read_for_model(const std::string& paths, const ModelShape& shape, Progress& progress,
                                    const RecordUse& use = {}, AsRead* as_read = nullptr);

// The way rows of text are read: for the objective and by the model's tokenizer. Text is refused with policy losses,
// whose tokens were sampled.
TextRows text_rows_of(const Options& options);

}  // namespace espalier
