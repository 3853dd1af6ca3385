#include "espalier/tasks/task_questions.h"

#include <algorithm>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/loop/random_streams.h"
#include "espalier/services/rollout_text.h"

namespace espalier {

Task task_of(const Options& options) { return {options.task, options.prompt_length}; }

std::vector<std::string> TaskTexts::read(std::span<const std::span<const std::int32_t>> turns) {
  const Vocabulary& words = Vocabulary::built_in();
  std::vector<std::string> out;
  for (const auto& turn : turns) {
    TokenIds said(turn.begin(), turn.end());
    std::erase(said, words.end());
    out.push_back(words.text(said));
  }
  return out;
}

std::vector<std::vector<std::int32_t>> TaskTexts::observations(std::span<const Observation> observations,
                                                               const Where& where) {
  std::vector<std::vector<std::int32_t>> out;
  for (std::size_t i = 0; i < observations.size(); ++i) {
    const Json content = Json::parse(observations[i].content);
    if (!content.is_string())
      throw InputError({where(i) + ", observation", "a text in the task's vocabulary", content.dump(), ""});
    out.push_back(Vocabulary::built_in().ids(content.get<std::string>(), where(i) + ", observation"));
  }
  return out;
}

std::vector<RenderedChat> TaskTexts::rendered(std::span<const RenderedTurn> turns, const Where&) {
  ESPALIER_INTERNAL(turns.empty(), "prompts of a task are words");
  return {};
}

std::vector<EncodedPrompt> TaskTexts::prompts(std::span<const std::string> messages, const Where&) {
  ESPALIER_INTERNAL(messages.empty(), "prompts of a task are words");
  return {};
}

TaskQuestions::TaskQuestions(const Options& options)
    : task_(task_of(options)), seed_(options.seed), val_size_(options.val_size) {
  if (options.prompt_length < task_.shortest_prompt())
    throw OptionError({"--prompt-length",
                       text_of("at least ", task_.shortest_prompt(), " tokens for ", name_of(task_.kind)),
                       text_of(options.prompt_length), ""});
  if (options.max_response_length < task_.longest_answer())
    throw OptionError({"--max-response-length",
                       text_of("at least the ", task_.longest_answer(), " tokens of the longest right answer of ",
                               name_of(task_.kind)),
                       text_of(options.max_response_length), ""});
  if (!options.reward.empty()) reward_.emplace(options.reward, options.reward_timeout);
}

Prompt TaskQuestions::prompt_of(const Problem& problem) const {
  const Vocabulary& words = Vocabulary::built_in();
  const std::string answer = words.text(problem.answer_ids);
  Prompt out;
  out.ids = problem.prompt_ids;
  carry_text(out.carried, "data_source", std::string("espalier/") + name_of(task_.kind));
  carry_text(out.carried, "prompt", words.text(problem.prompt_ids));
  carry_text(out.carried, "ground_truth", answer);
  return out;
}

std::vector<Prompt> TaskQuestions::train(const Draw& draw, std::int64_t count) {
  const Random random = random_of(seed_, Stream::train_prompts)
                            .fork(static_cast<std::uint64_t>(draw.batch))
                            .fork(static_cast<std::uint64_t>(draw.sampling));
  std::vector<Prompt> out;
  for (std::int64_t i = 0; i < count; ++i)
    out.push_back(prompt_of(task_.problems(Split::train, random.fork(static_cast<std::uint64_t>(i)), 1).front()));
  return out;
}

std::vector<Prompt> TaskQuestions::held_out() {
  const Random random = random_of(seed_, Stream::held_out_prompts);
  std::vector<Prompt> out;
  for (std::int64_t i = 0; i < val_size_; ++i)
    out.push_back(prompt_of(task_.problems(Split::held_out, random.fork(static_cast<std::uint64_t>(i)), 1).front()));
  return out;
}

std::vector<Judgement> TaskQuestions::judge(std::vector<Rollout>& rollouts, Progress& progress) {
  const Vocabulary& words = Vocabulary::built_in();
  std::vector<Judgement> out;
  for (Rollout& rollout : rollouts) {
    const TokenIds answer = words.ids(carried_fields(rollout)["ground_truth"].get<std::string>(), rollout.where);
    const double score = answer_score(rollout.response_ids, answer);
    out.push_back({score, score == 1 ? 1.0 : 0.0});
    const auto end = std::ranges::find(rollout.response_ids, words.end());
    carry_text(rollout.carried, "response", words.text({rollout.response_ids.begin(), end}));
  }
  if (!reward_) return out;
  const std::vector<Score> scores = reward_->of(rollouts, progress);
  for (std::size_t i = 0; i < out.size(); ++i) out[i].reward = scores[i].score;
  return out;
}

}  // namespace espalier
