#include "espalier/loop/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/base/units.h"
#include "espalier/generate/environment_turns.h"
#include "espalier/generate/generate_records.h"
#include "espalier/loop/random_streams.h"
#include "espalier/loop/shaping.h"
#include "espalier/metrics/timer.h"
#include "espalier/rollout/json_text.h"
#include "espalier/services/reward_function.h"
#include "espalier/services/rollout_text.h"
#include "espalier/shape/path_leaves.h"
#include "espalier/state/planning.h"

namespace espalier {
namespace {

void add(GenerateReport& sum, const GenerateReport& more) {
  sum.prompts += more.prompts, sum.responses += more.responses;
  sum.prompt_rows_logical += more.prompt_rows_logical, sum.prompt_rows_physical += more.prompt_rows_physical;
  sum.turns += more.turns, sum.observation_tokens += more.observation_tokens;
  sum.response_tokens += more.response_tokens, sum.decode_steps += more.decode_steps;
  sum.seconds_prompt += more.seconds_prompt, sum.seconds_decode += more.seconds_decode;
  sum.kv_bytes = std::max(sum.kv_bytes, more.kv_bytes);
  sum.kv_bytes_unshared = std::max(sum.kv_bytes_unshared, more.kv_bytes_unshared);
}

Json report_json(const GenerateReport& report) {
  return {{"prompts", report.prompts},
          {"responses", report.responses},
          {"prompt_rows", {{"logical", report.prompt_rows_logical}, {"physical", report.prompt_rows_physical}}},
          {"response_tokens", report.response_tokens},
          {"decode_steps", report.decode_steps},
          {"seconds", {{"prompt", report.seconds_prompt}, {"decode", report.seconds_decode}}},
          {"kv_bytes", {{"held", report.kv_bytes}, {"unshared", report.kv_bytes_unshared}}}};
}

std::string text_of_member(const Json& object, const char* name) {
  if (!object.contains(name)) return "";
  return object[name].is_string() ? object[name].get<std::string>() : object[name].dump();
}

// The records of each trajectory, which follow each other.
std::vector<std::vector<std::int64_t>> records_of(std::span<const std::int64_t> trajectory) {
  std::vector<std::vector<std::int64_t>> out;
  for (std::size_t i = 0; i < trajectory.size(); ++i) {
    if (i == 0 || trajectory[i] != trajectory[i - 1]) out.emplace_back();
    out.back().push_back(static_cast<std::int64_t>(i));
  }
  return out;
}

Answer answer_of(const Rollout& rollout, const Judgement& judgement) {
  const Json carried = carried_fields(rollout);
  std::string expected = text_of_member(carried, "ground_truth");
  if (expected.empty()) expected = text_of_member(carried.value("reward_model", Json::object()), "ground_truth");
  return {text_of_member(carried, "prompt"), text_of_member(carried, "response"), expected, judgement.reward};
}

}  // namespace

void check_sampling(const Options& options) {
  (void)sampling_settings(options);
  if (!options.val_prompts.empty() && options.prompts.empty())
    throw OptionError(
        {"--val-prompts", "--prompts, your own prompts for training", "no --prompts", "give --prompts FILE"});
  if (options.overlong_buffer_len > options.max_response_length)
    throw OptionError({"--overlong-buffer-len", text_of("at most --max-response-length ", options.max_response_length),
                       text_of(options.overlong_buffer_len), ""});
}

Sampling::Sampling(const Options& options, Questions& questions, const Decoder& decoder,
                   std::span<const HeldModel> held, Arena& arena, Progress& progress)
    : options_(options),
      questions_(questions),
      decoder_(decoder),
      arena_(arena),
      progress_(progress),
      held_out_(questions.held_out()),
      budget_(budget_of(options).bytes),
      held_bytes_(bytes_held(held, options.dtype)),
      sampled_(sampling_settings(options)) {
  sampled_.stop_ids = questions.stop_ids(), sampled_.stops = questions.stops();
  // From the run's budget, not from what is free now: how many are decoded at once decides how sums round.
  const std::int64_t rows = std::max(sampled_.token_budget > 0 ? sampled_.token_budget : kMostPromptRows,
                                     sampled_.max_num_seqs > 0 ? sampled_.max_num_seqs : kMostDecoded);
  const std::int64_t room = budget_ - held_bytes_ - sampling_bytes(decoder.shape(), options.dtype, rows);
  sampled_.kv_limit_bytes = std::clamp<std::int64_t>(room, 1, budget_ / 4);
}

// Every prompt is a group of its own.
Sampling::Scored Sampling::answer(std::vector<Prompt> prompts, const std::string& group,
                                  const SamplingSettings& settings) {
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    const std::string name = text_of(group, ", prompt ", i);
    prompts[i].group = json_quoted(name);
    if (prompts[i].where.empty()) prompts[i].where = name;
  }
  // Memory of the arena that an update touched would be held beside the keys and values.
  if (held_bytes_ + arena_.touched() + most_kv_bytes() > budget_) arena_.trim();
  Scored out;
  Generated generated = sampled(prompts, settings);
  out.rollouts = std::move(generated.rollouts), out.report = generated.report;
  out.trajectory = std::move(generated.trajectory);
  ESPALIER_INTERNAL_EQ(out.report.responses, static_cast<std::int64_t>(prompts.size()) * settings.n);
  out.judgements = judge(out.rollouts);
  return out;
}

Generated Sampling::sampled(const std::vector<Prompt>& prompts, const SamplingSettings& settings) {
  Environment* const environment = questions_.environment();
  if (environment == nullptr) return generate(decoder_, prompts, settings, arena_, progress_);
  Generated out =
      generate_trajectories(decoder_, prompts, settings, *environment, questions_.turn_texts(), arena_, progress_);
  if (out.failure) throw InputError(*out.failure);
  return out;
}

// An environment has rewarded them, and a reward of 1 is right.
// Rank 0 asks the reward function, which nobody says gives the same answer twice.
std::vector<Judgement> Sampling::judge(std::vector<Rollout>& rollouts) {
  const Mesh& mesh = decoder_.mesh();
  std::vector<Judgement> judgements(rollouts.size());
  if (questions_.environment()) {
    for (std::size_t i = 0; i < rollouts.size(); ++i)
      judgements[i] = {*rollouts[i].reward, *rollouts[i].reward == 1 ? 1.0 : 0.0};
    return judgements;
  }
  if (mesh.writes()) judgements = questions_.judge(rollouts, progress_);
  std::vector<double> numbers;  // NaN stands for none
  const double absent = mesh.writes() ? std::numeric_limits<double>::quiet_NaN() : 0.0;
  for (const Judgement& one : judgements)
    numbers.push_back(one.reward.value_or(absent)), numbers.push_back(one.right.value_or(absent));
  numbers = sums_over_ranks(mesh.world, std::move(numbers));  // the others add 0
  const auto known = [](double number) { return std::isnan(number) ? std::nullopt : std::optional(number); };
  for (std::size_t i = 0; i < judgements.size(); ++i)
    judgements[i] = {known(numbers[2 * i]), known(numbers[2 * i + 1])};
  return judgements;
}

SampledBatch Sampling::batch(std::int64_t index, std::int64_t drawn) {
  const Timer timer;
  SampledBatch out;
  GenerateReport generated;
  double responses = 0, judged = 0, marked = 0;
  const Random samples = random_of(options_.seed, Stream::sampling).fork(static_cast<std::uint64_t>(index));
  const std::int64_t most = options_.filter_groups ? options_.max_num_gen_batches : 1;
  while (out.samplings < most && count_groups(out.rollouts) < options_.train_batch_size) {
    const std::int64_t sampling = out.samplings++;
    std::vector<Prompt> prompts =
        questions_.train({index, sampling, drawn + out.prompts_drawn}, options_.train_batch_size);
    out.prompts_drawn += options_.train_batch_size;
    sampled_.seed = samples.fork(static_cast<std::uint64_t>(sampling)).bits();
    Scored scored = answer(std::move(prompts), text_of("batch ", index + 1, ", sampling ", sampling + 1), sampled_);
    add(generated, scored.report);
    for (const std::vector<std::int64_t>& records : records_of(scored.trajectory)) {
      std::int64_t length = 0;  // of all records of the trajectory
      for (const std::int64_t i : records) length += scored.rollouts[static_cast<std::size_t>(i)].response_length();
      const auto last = static_cast<std::size_t>(records.back());
      const Judgement& judgement = scored.judgements[last];
      std::optional<double> reward = judgement.reward;
      if (reward) {
        *reward += overlong_penalty(length, options_.max_response_length, options_.overlong_buffer_len,
                                    options_.overlong_penalty_factor);
        out.reward += *reward, judged += 1;
      }
      for (const std::int64_t i : records) scored.rollouts[static_cast<std::size_t>(i)].reward = reward;
      if (judgement.right) out.accuracy += *judgement.right, marked += 1;
      out.mean_length += static_cast<double>(length);
      out.longest = std::max(out.longest, length);
      responses += 1;
      if (scored.trajectory[last] % sampled_.n == 0) out.answers.push_back(answer_of(scored.rollouts[last], judgement));
    }
    if (options_.filter_groups)
      out.groups_dropped += keep_unequal_groups(std::move(scored.rollouts), options_.train_batch_size, out.rollouts);
    else
      out.rollouts = std::move(scored.rollouts);
  }
  if (judged == 0)
    throw InputError({options_.reward, "compute_score to judge a response of the batch", "None for every response",
                      "return a number where the answer can be judged"});
  out.reward /= judged, out.accuracy /= std::max(marked, 1.0), out.mean_length /= responses;
  out.unjudged = std::llround(responses - judged);
  if (const std::string note = unjudged_note(out.unjudged, std::llround(responses)); !note.empty())
    progress_.note(note);
  for (std::size_t i = 0; i < out.rollouts.size(); ++i) out.rollouts[i].index = static_cast<std::int64_t>(i);
  if (questions_.environment()) out.mean_turns = static_cast<double>(generated.turns) / responses;
  out.generated = report_json(generated);
  out.tokens_saved = generated.prompt_rows_logical - generated.prompt_rows_physical;
  out.seconds = timer.total();
  return out;
}

std::optional<Evaluation> Sampling::evaluate() {
  if (held_out_.empty()) return std::nullopt;
  SamplingSettings greedy = sampled_;
  greedy.n = 1, greedy.temperature = 0, greedy.seed = 0;
  const Scored scored = answer(held_out_, "held out", greedy);
  Evaluation out;
  double judged = 0, marked = 0;
  if (questions_.environment())
    out.mean_turns = static_cast<double>(scored.report.turns) / static_cast<double>(scored.report.responses);
  for (const std::vector<std::int64_t>& records : records_of(scored.trajectory)) {
    const auto last = static_cast<std::size_t>(records.back());
    const Judgement& judgement = scored.judgements[last];
    if (judgement.right) out.accuracy += *judgement.right, marked += 1;
    if (judgement.reward) out.reward += *judgement.reward, judged += 1;
    for (const std::int64_t i : records)
      out.mean_length += scored.rollouts[static_cast<std::size_t>(i)].response_length();
    out.answers.push_back(answer_of(scored.rollouts[last], judgement));
  }
  out.accuracy /= std::max(marked, 1.0), out.reward /= std::max(judged, 1.0);
  out.mean_length /= static_cast<double>(scored.report.responses);
  return out;
}

std::int64_t Sampling::longest_rollout() const {
  const std::int64_t prompt = questions_.longest_prompt(), positions = decoder_.shape().max_positions;
  const std::int64_t whole = prompt + options_.max_response_length;
  // An observation of reset may fill a prompt's positions, and then its response does not end at them.
  return prompt >= positions || !options_.env.empty() ? whole : std::min(whole, positions);
}

// The most bytes of keys and values that a batch or an evaluation holds at once.
std::int64_t Sampling::most_kv_bytes() const {
  const std::int64_t prompt = questions_.longest_prompt();
  const std::int64_t batch = options_.train_batch_size * (prompt + sampled_.n * options_.max_response_length);
  const auto held_out = static_cast<std::int64_t>(held_out_.size()) * (prompt + options_.max_response_length);
  const std::int64_t token = kv_bytes_per_token(decoder_.shape(), options_.dtype);
  const std::int64_t states = std::max(options_.train_batch_size * (1 + sampled_.n), 2 * std::ssize(held_out_));
  return std::min(sampled_.kv_limit_bytes,
                  std::max(batch, held_out) * token + states * StateBuffers(decoder_.sizes(), false).peak());
}

}  // namespace espalier
