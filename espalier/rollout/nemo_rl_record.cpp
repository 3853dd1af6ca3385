// NeMo-RL's train_data_step{N}.jsonl: one sample a line, every field the slice of a batch (a list of length one around
// the sample's own value; older and converted files without that list are read too).
//
//   token_ids            prompt and response, right-padded to the longest of the batch
//   input_lengths        tokens that are not padding (absent: no padding)
//   token_loss_mask      1 where a token was generated and counts; sample_loss_mask 0 drops the whole sample
//   advantages           per token; generation_logprobs -> rollout_logprobs, prev_logprobs -> old_logprobs,
//                        reference_policy_logprobs -> ref_logprobs: the log-prob of token t stands at t, the first is 0
//   filtered_rewards     -> reward, else rewards. With dynamic sampling `rewards` belong to all prompts that were
//                        sampled, and not to the samples of the file
//   content, idx, agent_ref are carried through, other fields too, with a note
//
// The format has no border between prompt and response. Here the prompt ends before the first token with loss; what
// follows is the response, with the turns in between (tool output, user turns) masked. A sample without any such token
// is all prompt, with an empty response. A sample dropped by sample_loss_mask keeps its border.
// There is no group either: equal prompts of one step form a group. The step is the number in the file's name.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>

#include "espalier/rollout/json_text.h"
#include "espalier/rollout/record_format.h"
#include "espalier/rollout/settled_series.h"

namespace espalier {
namespace {

constexpr ListShape kWrapped = ListShape::flat_or_wrapped;

struct Sample {
  std::vector<std::int32_t> token_ids;
  std::vector<std::uint8_t> token_loss_mask;
  std::vector<double> advantages, generation_logprobs, prev_logprobs, reference_policy_logprobs;
  std::optional<double> input_length, sample_loss_mask, reward, filtered_reward;
};

using Series = std::vector<double> Sample::*;
struct SeriesField {
  std::string_view name;
  Series of_sample;
  std::vector<double> Rollout::*of_rollout;
};
constexpr SeriesField kSeries[] = {
    {"advantages", &Sample::advantages, &Rollout::advantages},
    {"generation_logprobs", &Sample::generation_logprobs, &Rollout::rollout_logprobs},
    {"prev_logprobs", &Sample::prev_logprobs, &Rollout::old_logprobs},
    {"reference_policy_logprobs", &Sample::reference_policy_logprobs, &Rollout::ref_logprobs},
};
constexpr std::string_view kCarried[] = {"content", "idx", "agent_ref"};

// A number, alone or in a list of one.
double read_single(JsonValue value, const RecordPlace& place, std::string_view field) {
  if (!is_list(value)) return read_number(value, place, field);
  std::vector<double> numbers;
  read_numbers(value, place, field, kWrapped, numbers);
  if (numbers.size() != 1) throw place.wrong(field, "one number", text_of(numbers.size(), " numbers"));
  return numbers[0];
}

std::int64_t used_length(const Sample& sample, const RecordPlace& place) {
  const auto padded = static_cast<double>(sample.token_ids.size());
  const double used = sample.input_length.value_or(padded);
  if (!(used >= 1 && used <= padded && used == std::floor(used)))
    throw place.wrong("input_lengths",
                      text_of("an integer in [1, ", sample.token_ids.size(), "], the length of token_ids"),
                      text_of(used));
  return static_cast<std::int64_t>(used);
}

// The part of a per-token series that belongs to the response; empty stays empty.
template <class T>
std::vector<T> response_part(const std::vector<T>& series, const Sample& sample, std::int64_t begin, std::int64_t end,
                             const RecordPlace& place, std::string_view field) {
  if (series.empty()) return {};
  if (series.size() != sample.token_ids.size())
    throw place.wrong(field, text_of(sample.token_ids.size(), " entries, one per token with padding"),
                      text_of(series.size()));
  return std::vector<T>(series.begin() + begin, series.begin() + end);
}

Rollout assembled(const Sample& sample, const RecordPlace& place, std::int64_t& unsampled_tokens) {
  if (sample.token_ids.empty()) throw place.wrong("token_ids", "at least one token", "none");
  const std::int64_t end = used_length(sample, place);
  if (sample.token_loss_mask.empty())
    throw place.wrong("token_loss_mask", "this field, which separates the response from the prompt", "none");
  std::int64_t begin = 0;
  const auto mask = response_part(sample.token_loss_mask, sample, 0, end, place, "token_loss_mask");
  while (begin < end && !mask[static_cast<std::size_t>(begin)]) ++begin;
  if (begin == 0) throw place.wrong("token_loss_mask", "0 for the first token: a prompt has at least one", "1");

  Rollout rollout;
  rollout.prompt_ids.assign(sample.token_ids.begin(), sample.token_ids.begin() + begin);
  rollout.response_ids.assign(sample.token_ids.begin() + begin, sample.token_ids.begin() + end);
  rollout.loss_mask.assign(mask.begin() + begin, mask.end());
  if (sample.sample_loss_mask) {
    if (*sample.sample_loss_mask != 0 && *sample.sample_loss_mask != 1)
      throw place.wrong("sample_loss_mask", "0 or 1", text_of(*sample.sample_loss_mask));
    if (*sample.sample_loss_mask == 0) rollout.loss_mask.assign(rollout.loss_mask.size(), 0);
  }
  for (const auto& [name, of_sample, of_rollout] : kSeries) {
    std::vector<double>& series = rollout.*of_rollout;
    series = response_part(sample.*of_sample, sample, begin, end, place, name);
    if (of_rollout == &Rollout::rollout_logprobs)
      unsampled_tokens += settle_sampled(series, rollout.loss_mask);
    else
      settle_series(series, rollout.loss_mask, {place, name, begin});
  }
  rollout.reward = sample.filtered_reward ? sample.filtered_reward : sample.reward;
  return rollout;
}

}  // namespace

Rollout read_nemo_rl_record(RecordReader& reader, std::string_view line, const RecordPlace& place,
                            std::optional<std::int64_t> step) {
  Sample sample;
  std::string carried;
  for_each_member(reader.parser, line, place, [&](std::string_view key, JsonValue value) {
    const auto* const series = std::ranges::find(kSeries, key, &SeriesField::name);
    if (series != std::end(kSeries))
      read_series(value, place, key, kWrapped, sample.*series->of_sample);
    else if (key == "token_ids")
      read_token_ids(value, place, key, reader.vocabulary, kWrapped, sample.token_ids);
    else if (key == "token_loss_mask")
      read_mask(value, place, key, kWrapped, sample.token_loss_mask);
    else if (key == "input_lengths")
      sample.input_length = read_single(value, place, key);
    else if (key == "sample_loss_mask")
      sample.sample_loss_mask = read_single(value, place, key);
    else if (key == "rewards")
      sample.reward = read_single(value, place, key);
    else if (key == "filtered_rewards")
      sample.filtered_reward = read_single(value, place, key);
    else {
      if (std::ranges::find(kCarried, key) == std::end(kCarried))
        reader.unknown_fields.try_emplace(std::string(key), place.where());
      add_carried(carried, key, read_raw(value, place, key));
    }
  });
  Rollout rollout = assembled(sample, place, reader.unsampled_tokens);
  rollout.temperature = reader.temperature;
  rollout.carried = std::move(carried);
  rollout.step = step;
  return rollout;
}

std::optional<std::int64_t> step_of_nemo_rl_name(const std::string& path) {
  const std::string name = std::filesystem::path(path).filename().string();
  constexpr std::string_view kStart = "train_data_step";
  if (!name.starts_with(kStart)) return {};
  std::int64_t step = 0;
  const char* const end = name.data() + name.size();
  const auto [rest, error] = std::from_chars(name.data() + kStart.size(), end, step);
  const std::string_view ending(rest, static_cast<std::size_t>(end - rest));
  if (error != std::errc() || step < 0 || (ending != ".jsonl" && ending != ".jsonl.gz")) return {};
  return step;
}

}  // namespace espalier
