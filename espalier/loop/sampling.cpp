#include "espalier/loop/sampling.h"

#include <algorithm>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/base/units.h"
#include "espalier/generate/generate_records.h"
#include "espalier/loop/random_streams.h"
#include "espalier/loop/shaping.h"
#include "espalier/observe/timer.h"
#include "espalier/plan/memory_model.h"
#include "espalier/rollout/json_text.h"

namespace espalier {
namespace {

void add(GenerateReport& sum, const GenerateReport& more) {
  sum.prompts += more.prompts, sum.responses += more.responses;
  sum.prompt_rows_logical += more.prompt_rows_logical, sum.prompt_rows_physical += more.prompt_rows_physical;
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

}  // namespace

Task task_of(const Options& options) { return {options.task, options.prompt_length}; }

void check_sampling(const Options& options) {
  const Task task = task_of(options);
  (void)sampling_settings(options);
  if (options.prompt_length < task.shortest_prompt())
    throw OptionError({"--prompt-length", text_of("at least ", task.shortest_prompt(), " tokens for ", task.name),
                       text_of(options.prompt_length), ""});
  if (options.max_response_length < task.longest_answer())
    throw OptionError({"--max-response-length",
                       text_of("at least the ", task.longest_answer(), " tokens of a right answer of ", task.name),
                       text_of(options.max_response_length), ""});
  if (options.overlong_buffer_len > options.max_response_length)
    throw OptionError({"--overlong-buffer-len", text_of("at most --max-response-length ", options.max_response_length),
                       text_of(options.overlong_buffer_len), ""});
}

Sampling::Sampling(const Options& options, const Decoder& decoder, Arena& arena, Progress& progress)
    : options_(options),
      task_(task_of(options)),
      decoder_(decoder),
      arena_(arena),
      progress_(progress),
      reward_(make_reward(options.reward, options.task)),
      sampled_(sampling_settings(options)) {
  sampled_.stop_ids = {Vocabulary::built_in().end()};
  // Of the run's budget, not of what is free now: how many are decoded at once decides how sums round.
  sampled_.kv_limit_bytes = parse_bytes(options.memory_budget, "--memory-budget") / 4;
}

Sampling::Scored Sampling::answer(const std::vector<Problem>& problems, const std::string& group,
                                  const SamplingSettings& settings, GenerateReport* report) {
  std::vector<Prompt> prompts;
  for (std::size_t i = 0; i < problems.size(); ++i) {
    const std::string name = text_of(group, ", prompt ", i);
    const std::string answer = json_quoted(Vocabulary::built_in().text(problems[i].answer_ids));
    prompts.push_back(
        {problems[i].prompt_ids, json_quoted(name), text_of("{\"meta\": {\"answer\": ", answer, "}}"), name});
  }
  Scored out;
  out.rollouts = generate(decoder_, prompts, settings, arena_, progress_, report);
  ESPALIER_INTERNAL_EQ(out.rollouts.size(), problems.size() * static_cast<std::size_t>(settings.n));
  for (std::size_t i = 0; i < out.rollouts.size(); ++i) {
    const Problem& problem = problems[i / static_cast<std::size_t>(settings.n)];
    ESPALIER_INTERNAL(out.rollouts[i].prompt_ids == problem.prompt_ids, "rollouts out of order");
    out.problems.push_back(&problem);
    out.rewards.push_back(reward_->of(problem, out.rollouts[i].response_ids));
  }
  return out;
}

SampledBatch Sampling::batch(std::int64_t index) {
  const Timer timer;
  SampledBatch out;
  GenerateReport generated;
  double responses = 0;
  const Random prompts = random_of(options_.seed, Stream::train_prompts).fork(static_cast<std::uint64_t>(index));
  const Random samples = random_of(options_.seed, Stream::sampling).fork(static_cast<std::uint64_t>(index));
  const std::int64_t most = options_.filter_groups ? options_.max_num_gen_batches : 1;
  while (out.samplings < most && count_groups(out.rollouts) < options_.train_batch_size) {
    const auto sampling = static_cast<std::uint64_t>(out.samplings++);
    std::vector<Problem> problems;
    for (std::int64_t i = 0; i < options_.train_batch_size; ++i)
      problems.push_back(
          task_.problems(Split::train, prompts.fork(sampling).fork(static_cast<std::uint64_t>(i)), 1).front());
    GenerateReport report;
    sampled_.seed = samples.fork(sampling).bits();
    Scored scored = answer(problems, text_of("batch ", index + 1, ", sampling ", sampling + 1), sampled_, &report);
    add(generated, report);
    for (std::size_t i = 0; i < scored.rollouts.size(); ++i) {
      Rollout& rollout = scored.rollouts[i];
      rollout.reward =
          scored.rewards[i] + overlong_penalty(rollout.response_length(), options_.max_response_length,
                                               options_.overlong_buffer_len, options_.overlong_penalty_factor);
      out.reward += *rollout.reward;
      out.accuracy += answer_score(rollout.response_ids, scored.problems[i]->answer_ids) == 1;
      out.mean_length += rollout.response_length();
      out.longest = std::max<std::int64_t>(out.longest, rollout.response_length());
      responses += 1;
    }
    if (options_.filter_groups)
      out.groups_dropped += keep_unequal_groups(std::move(scored.rollouts), options_.train_batch_size, out.rollouts);
    else
      out.rollouts = std::move(scored.rollouts);
  }
  out.reward /= responses, out.accuracy /= responses, out.mean_length /= responses;
  for (std::size_t i = 0; i < out.rollouts.size(); ++i) out.rollouts[i].index = static_cast<std::int64_t>(i);
  out.generated = report_json(generated);
  out.tokens_saved = generated.prompt_rows_logical - generated.prompt_rows_physical;
  out.seconds = timer.total();
  return out;
}

Evaluation Sampling::evaluate() {
  const Random random = random_of(options_.seed, Stream::held_out_prompts);
  std::vector<Problem> problems;
  for (std::int64_t i = 0; i < options_.val_size; ++i)
    problems.push_back(task_.problems(Split::held_out, random.fork(static_cast<std::uint64_t>(i)), 1).front());
  SamplingSettings greedy = sampled_;
  greedy.n = 1, greedy.temperature = 0, greedy.seed = 0;
  const Scored scored = answer(problems, "held out", greedy, nullptr);
  const Vocabulary& words = Vocabulary::built_in();
  Evaluation out;
  for (std::size_t i = 0; i < problems.size(); ++i) {
    const Rollout& rollout = scored.rollouts[i];
    out.accuracy += answer_score(rollout.response_ids, problems[i].answer_ids) == 1;
    out.reward += scored.rewards[i];
    out.mean_length += rollout.response_length();
    out.answers.push_back({words.text(rollout.prompt_ids), words.text(rollout.response_ids),
                           words.text(problems[i].answer_ids), scored.rewards[i]});
  }
  const auto count = static_cast<double>(problems.size());
  out.accuracy /= count, out.reward /= count, out.mean_length /= count;
  return out;
}

std::int64_t Sampling::most_kv_bytes() const {
  const std::int64_t batch =
      options_.train_batch_size * (options_.prompt_length + sampled_.n * options_.max_response_length);
  const std::int64_t held_out = options_.val_size * (options_.prompt_length + options_.max_response_length);
  const std::int64_t token = kv_bytes_per_token(decoder_.shape(), parse_dtype(options_.dtype));
  return std::min(sampled_.kv_limit_bytes, std::max(batch, held_out) * token);
}

}  // namespace espalier
