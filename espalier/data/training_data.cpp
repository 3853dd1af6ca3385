#include "espalier/data/training_data.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/config/rope_config.h"
#include "espalier/grouping/shared_tokens.h"
#include "espalier/objective/objective.h"
#include "espalier/objective/rejection.h"
#include "espalier/objective/score_loss.h"
#include "espalier/objective/value_loss.h"
#include "espalier/options/column_names.h"
#include "espalier/plan/recorded_experts_fit.h"
#include "espalier/rollout/kept_sets.h"
#include "espalier/rollout/mini_batches.h"
#include "espalier/rollout/reader.h"
#include "espalier/rollout/record_data.h"
#include "espalier/rollout/trajectories.h"
#include "espalier/state/trained_choice.h"

namespace espalier {
namespace {

// FNV-1a over 32-bit words.
class TokenFingerprint {
 public:
  void add(std::uint32_t word) { hash_ = (hash_ ^ word) * 0x100000001b3u; }
  void add(const std::vector<std::int32_t>& ids) {
    add(static_cast<std::uint32_t>(ids.size()));
    for (const std::int32_t id : ids) add(static_cast<std::uint32_t>(id));
  }
  void add(const std::vector<double>& values) {
    add(static_cast<std::uint32_t>(values.size()));
    for (const double value : values) add(value);
  }
  void add(const std::string& text) {
    add(static_cast<std::uint32_t>(text.size()));
    for (const char byte : text) add(std::uint32_t{static_cast<unsigned char>(byte)});
  }
  void add(double value) {
    const auto bits = std::bit_cast<std::uint64_t>(value);
    add(static_cast<std::uint32_t>(bits));
    add(static_cast<std::uint32_t>(bits >> 32));
  }
  template <class T>
  void add(const std::optional<T>& value) {
    add(std::uint32_t{value.has_value()});
    if constexpr (std::is_enum_v<T>)
      add(static_cast<std::uint32_t>(value.value_or(T{})));
    else
      add(static_cast<double>(value.value_or(0)));
  }
  std::string text() const { return text_of(std::hex, hash_); }

 private:
  std::uint64_t hash_ = 0xcbf29ce484222325u;
};

std::map<std::string, std::string> fingerprints_of(const std::vector<Rollout>& rollouts) {
  std::map<std::string, TokenFingerprint> fields;
  for (const Rollout& rollout : rollouts) {
    fields["reward"].add(rollout.reward ? std::vector{*rollout.reward} : std::vector<double>());
    fields["advantage"].add(rollout.advantages);
    if (rollout.pair.pair >= 0) {
      fields["pair"].add(std::uint32_t{rollout.pair.chosen});
      if (rollout.pair.ref_logprob) fields["ref_logps"].add(*rollout.pair.ref_logprob);
      if (rollout.pair.score) fields["score"].add(*rollout.pair.score);
      if (rollout.pair.margin != 0) fields["margin"].add(rollout.pair.margin);
    }
    for (std::size_t t = 0; t < rollout.loss_mask.size(); ++t)
      fields["loss_mask"].add(std::uint32_t{rollout.loss_mask[t] != 0 || rollout.silence_of(t) != Silenced::no});
    if (!rollout.token_rewards.empty()) fields["reward"].add(rollout.token_rewards);
    fields["temperature"].add(rollout.temperature);
    for (const ScalarRow& row : scalar_rows())
      if (row.use == DataUse::update)
        std::visit([&](auto member) { fields[std::string(row.name)].add(rollout.*member); }, row.value);
    for (const SeriesRow& row : series_rows())
      if (row.use == DataUse::update) fields[std::string(row.name)].add(rollout.*row.values);
    if (!rollout.kept_sets.empty()) {
      fields["kept_ids"].add(rollout.kept_sets.ids);
      for (const std::int64_t begin : rollout.kept_sets.begin)
        fields["kept_ids"].add(static_cast<std::uint32_t>(begin));
    }
  }
  std::map<std::string, std::string> out;
  for (const auto& [name, fingerprint] : fields) out[name] = fingerprint.text();
  return out;
}

// Advantages of rollouts that stand together, in the unit they are computed over: one `step`, or everything.
std::vector<std::vector<double>> advantages_of(const std::vector<Rollout>& rollouts,
                                               const std::vector<std::size_t>& begins, const Options& options) {
  if (options.objective != ObjectiveKind::grpo) {
    std::vector<std::vector<double>> ones;  // ones of pairs and lists come with each step
    for (const Rollout& rollout : rollouts) ones.emplace_back(rollout.response_ids.size(), 1.0);
    return ones;
  }
  const bool by_step = !rollouts.empty() && rollouts.front().step.has_value();
  if (!by_step) return compute_advantages(rollouts, options);
  std::vector<std::vector<double>> out;
  for (std::size_t i = 0; i + 1 < begins.size(); ++i) {
    const std::span<const Rollout> records(rollouts.data() + begins[i], begins[i + 1] - begins[i]);
    std::ranges::move(compute_advantages(records, options), std::back_inserter(out));
  }
  return out;
}

void check_pairs(std::span<const Rollout> rollouts, const Options& options) {
  const bool scores = options.objective == ObjectiveKind::reward;
  const bool wanted = scores || options.objective == ObjectiveKind::dpo;
  for (const Rollout& rollout : rollouts) {
    if (wanted != (rollout.pair.pair >= 0))
      throw InputError({rollout.where,
                        wanted ? text_of("chosen_ids and rejected_ids", scores ? ", or answers," : "",
                                         " with --objective ", options.objective)
                               : "response_ids in every record",
                        wanted ? "a record of one response" : "a pair of answers",
                        wanted ? "give pairs of answers (docs/pairs.md), or leave --objective out"
                               : "give --objective dpo or reward to train on pairs"});
    if (!scores && rollout.pair.score)
      throw InputError({rollout.where, "chosen_ids and rejected_ids with --objective dpo", "a list of scored answers",
                        "record pairs, or train a reward model with --objective reward"});
  }
}

}  // namespace

std::vector<std::string> position_notes(std::span<const Rollout> rollouts, const ModelShape& shape) {
  const auto longest = std::ranges::max_element(rollouts, {}, &Rollout::length);
  if (longest == rollouts.end()) return {};
  return position_notes(shape, longest->length(), text_of(longest->where, " has ", longest->length(), " tokens"));
}

// Sets of which the loss says less than their records may suggest.
std::vector<std::string> notes_on_sets(std::span<const Rollout> rollouts, const Options& options) {
  std::vector<std::string> notes;
  if (options.objective == ObjectiveKind::dpo &&
      std::ranges::any_of(rollouts, [](const Rollout& each) { return each.pair.margin != 0; }))
    notes.push_back("margin is a field of --objective reward: dpo does not use it");
  std::map<std::int64_t, std::pair<double, bool>> lists;  // the first score, and whether all have it
  for (const Rollout& rollout : rollouts)
    if (rollout.pair.score) {
      auto& [first, equal] = lists.try_emplace(rollout.pair.pair, *rollout.pair.score, true).first->second;
      equal = equal && first == *rollout.pair.score;
    }
  const auto tied = std::ranges::count_if(lists, [](const auto& list) { return list.second.second; });
  if (tied > 0) notes.push_back(text_of(tied, " of ", lists.size(), " lists have only equal scores and rank nothing"));
  return notes;
}

TrainingData::TrainingData(std::vector<Rollout> rollouts, const Options& options, bool with_critic)
    : options_(options) {
  require_series(rollouts, options);
  const auto batches = cut_mini_batches(rollouts, options.mini_batch_size);
  for (std::string note :
       {settle_turn_rewards(rollouts, options.turn_rewards), settle_loss_unit(rollouts, options.loss_unit),
        mini_batch_note(rollouts, batches, options.mini_batch_size)})
    if (!note.empty()) notes_.push_back(std::move(note));
  std::ranges::move(settle_shared_tokens(rollouts, options.shared_tokens), std::back_inserter(notes_));
  if (std::string note = reject_tokens(rollouts, options); !note.empty()) notes_.push_back(std::move(note));
  check_pairs(rollouts, options);
  for (std::string& note : notes_on_sets(rollouts, options)) notes_.push_back(std::move(note));
  if (options.objective == ObjectiveKind::reward) end_with_scores(rollouts);
  rollouts_.reserve(rollouts.size());
  begins_.push_back(0);
  for (const auto& batch : batches) {
    for (const std::int64_t index : batch) rollouts_.push_back(std::move(rollouts[static_cast<std::size_t>(index)]));
    begins_.push_back(rollouts_.size());
  }
  fields_ = fingerprints_of(rollouts_);
  if (!with_critic) {
    advantages_ = advantages_of(rollouts_, begins_, options);
    const std::int64_t unjudged = options.objective == ObjectiveKind::grpo ? count_unjudged(rollouts_) : 0;
    if (unjudged > 0)
      notes_.push_back(
          text_of(unjudged, " of ", rollouts_.size(),
                  " records have neither reward nor advantage: their advantage is 0, and they have no part "
                  "in their group's statistics"));
    return;
  }
  check_value_targets(rollouts_);  // before the first step, not when its turn comes
  prepared_.resize(batches.size());
  advantages_.resize(rollouts_.size()), targets_.resize(rollouts_.size());
  for (const Rollout& rollout : rollouts_)
    values_are_recorded_.push_back(rollout.values.size() == rollout.response_ids.size());
}

void TrainingData::prepare(std::int64_t index, const ValueFunction& values_of) {
  std::uint8_t& prepared = prepared_.at(has_steps() ? static_cast<std::size_t>(index) : 0);
  if (std::exchange(prepared, 1)) return;
  const std::size_t begin = has_steps() ? begins_.at(static_cast<std::size_t>(index)) : 0;
  const std::size_t end = has_steps() ? begins_.at(static_cast<std::size_t>(index) + 1) : rollouts_.size();
  const std::span<Rollout> unit(rollouts_.data() + begin, end - begin);
  const auto recorded = std::span(values_are_recorded_).subspan(begin, unit.size());
  if (std::ranges::find(recorded, 0) != recorded.end()) {
    std::vector<std::vector<double>> values = values_of(unit);
    for (std::size_t i = 0; i < unit.size(); ++i)
      if (!recorded[i]) unit[i].values = std::move(values[i]);
  }
  std::ranges::move(compute_advantages(unit, options_), advantages_.begin() + static_cast<std::ptrdiff_t>(begin));
  std::ranges::move(compute_value_targets(unit, options_), targets_.begin() + static_cast<std::ptrdiff_t>(begin));
}

std::vector<double> TrainingData::values() const {
  std::vector<double> out;
  for (const Rollout& rollout : rollouts_) {
    out.insert(out.end(), rollout.values.begin(), rollout.values.end());
    out.resize(out.size() + rollout.response_ids.size() - rollout.values.size(),
               std::numeric_limits<double>::quiet_NaN());
  }
  return out;
}

bool TrainingData::restore_values(std::span<const double> values) {
  std::size_t tokens = 0;
  for (const Rollout& rollout : rollouts_) tokens += rollout.response_ids.size();
  if (tokens != values.size()) return false;
  auto next = values.begin();
  for (std::size_t i = 0; i < rollouts_.size(); ++i) {
    const auto last = next + rollouts_[i].response_length();
    if (std::none_of(next, last, [](double value) { return std::isnan(value); })) {
      rollouts_[i].values.assign(next, last);
      values_are_recorded_[i] = 1;
    }
    next = last;
  }
  return true;
}

MiniBatch TrainingData::mini_batch(std::int64_t index) const {
  const std::size_t begin = begins_.at(static_cast<std::size_t>(index));
  const std::size_t count = begins_.at(static_cast<std::size_t>(index) + 1) - begin;
  const auto targets = targets_.empty() ? std::span(targets_) : std::span(targets_).subspan(begin, count);
  return {std::span(rollouts_).subspan(begin, count), std::span(advantages_).subspan(begin, count), targets};
}

std::int32_t TrainingData::longest() const {
  std::int32_t longest = 0;
  for (const Rollout& rollout : rollouts_) longest = std::max(longest, rollout.length());
  return longest;
}

std::string TrainingData::fingerprint() const { return fingerprint_of(rollouts_); }

std::string fingerprint_of(std::span<const Rollout> rollouts) {
  TokenFingerprint fingerprint;
  for (const Rollout& rollout : rollouts) {
    fingerprint.add(rollout.prompt_ids);
    fingerprint.add(rollout.response_ids);
    for (const std::uint16_t expert : rollout.recorded_experts.ids) fingerprint.add(std::uint32_t{expert});
  }
  return fingerprint.text();
}

TextRows text_rows_of(const Options& options) {
  if (options.objective == ObjectiveKind::grpo) {
    require_no_columns(options);
    return {};
  }
  return {name_of(options.objective), model_source(options), options.columns};
}

void refuse_image_tokens(std::span<const std::int32_t> ids, const std::string& where, const ModelShape& shape) {
  if (shape.image_tokens.empty()) return;
  for (const std::int32_t id : ids)
    if (std::ranges::find(shape.image_tokens, id) != shape.image_tokens.end())
      throw UnsupportedError({where, "text: the program runs the model without its vision tower",
                              text_of("token ", id, ", which stands for an image or a video"),
                              "espalier.hf, espalier.trl and espalier.verl train with images (docs/python.md)"});
}

RecordUse record_use_of(const Options& options, const TextRows& rows) {
  return {options.temperature, options.kept_sets, rows};
}

void AsRead::give_back(std::size_t index, Rollout& rollout) {
  rollout.recorded_experts = std::move(experts[index]);
  if (!kept_sets.empty()) rollout.kept_sets = std::move(kept_sets[index]);
}

std::vector<Rollout> read_for_model(const std::string& paths, const ModelShape& shape, Progress& progress,
                                    const RecordUse& use, AsRead* as_read) {
  if (!(use.temperature > 0))
    throw OptionError({"--temperature", "a number above 0, by which logits are divided", text_of(use.temperature),
                       "leave it out if the records have a temperature"});
  ReadOptions options;
  options.vocabulary = shape.vocabulary;
  options.temperature = use.temperature;
  options.rows = use.rows;
  bool begun = false;
  options.progress = [&](std::int64_t done, std::int64_t total) {
    if (!begun) progress.begin("reading rollouts", total, "bytes");
    begun = true;
    progress.advance_to(done);
  };
  RolloutFile file = read_rollouts(split_paths(paths), options);
  if (begun) progress.end();
  for (const std::string& note : file.notes) progress.note(note);
  for (const std::string& note : position_notes(file.rollouts, shape)) progress.note(note);
  if (as_read) {
    for (const Rollout& rollout : file.rollouts) as_read->experts.push_back(rollout.recorded_experts);
    if (use.kept_sets == KeptSetsUse::ignore)
      for (const Rollout& rollout : file.rollouts) as_read->kept_sets.push_back(rollout.kept_sets);
  }
  for (const Rollout& rollout : file.rollouts) {
    refuse_image_tokens(rollout.prompt_ids, rollout.where + ": prompt_ids", shape);
    refuse_image_tokens(rollout.response_ids, rollout.where + ": response_ids", shape);
  }
  if (const std::string note = settle_kept_sets(file.rollouts, use.kept_sets); !note.empty() && !shape.value_head)
    progress.note(note);
  fit_recorded_experts(file.rollouts, shape);
  if (const std::string note = recorded_experts_note(file.rollouts); !note.empty()) progress.note(note);
  return std::move(file.rollouts);
}

}  // namespace espalier
