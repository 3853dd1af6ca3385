#include "espalier/loop/file_questions.h"

#include <algorithm>
#include <numeric>

#include "espalier/base/error.h"
#include "espalier/generate/generate_records.h"
#include "espalier/generate/prompts_file.h"
#include "espalier/loop/random_streams.h"
#include "espalier/rollout/json_text.h"
#include "espalier/services/rollout_text.h"

namespace espalier {

FileQuestions::FileQuestions(const Options& options, const std::filesystem::path& source, const ModelShape& shape,
                             Progress& progress)
    : seed_(options.seed), tokenizer_(source.string(), options.chat_template_kwargs) {
  if (!options.reward.empty()) reward_.emplace(options.reward, options.reward_timeout);
  prompts_ = read(options.prompts, options.columns, shape, progress);
  if (!options.val_prompts.empty()) held_out_ = read(options.val_prompts, options.columns, shape, progress);
  if (static_cast<std::int64_t>(held_out_.size()) > options.val_size)
    held_out_.resize(static_cast<std::size_t>(options.val_size));
  Options own = options;
  own.model = source.string();
  stop_ids_ = espalier::stop_ids(own, shape.vocabulary, &tokenizer_.get());
  turn_texts_.emplace(tokenizer_.get());
  if (!options.stop.empty()) stops_.emplace(split_paths(options.stop), tokenizer_.get());
  if (stop_ids_.empty() && !stops_)
    progress.note(
        "no stop tokens: neither model nor tokenizer has an eos token, so every response has the full length");
}

std::vector<Prompt> FileQuestions::read(const std::string& path, const std::string& columns, const ModelShape& shape,
                                        Progress& progress) {
  PromptFile file = read_prompts(path, shape.vocabulary, tokenizer_, progress, columns);
  for (const std::string& note : file.notes) progress.note(note);
  for (const Prompt& prompt : file.prompts) longest_ = std::max(longest_, static_cast<std::int64_t>(prompt.ids.size()));
  return std::move(file.prompts);
}

void FileQuestions::shuffle(std::int64_t pass) {
  if (pass == pass_) return;
  Random random = random_of(seed_, Stream::train_prompts).fork(static_cast<std::uint64_t>(pass));
  order_.resize(prompts_.size());
  std::iota(order_.begin(), order_.end(), 0);
  for (std::size_t i = order_.size(); i > 1; --i)
    std::swap(order_[i - 1], order_[static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(i) - 1))]);
  pass_ = pass;
}

std::vector<Prompt> FileQuestions::train(const Draw& draw, std::int64_t count) {
  const auto size = static_cast<std::int64_t>(prompts_.size());
  std::vector<Prompt> out;
  for (std::int64_t at = draw.drawn; at < draw.drawn + count; ++at) {
    shuffle(at / size);
    out.push_back(prompts_[order_[static_cast<std::size_t>(at % size)]]);
  }
  return out;
}

std::vector<Judgement> FileQuestions::judge(std::vector<Rollout>& rollouts, Progress& progress) {
  add_texts(rollouts, tokenizer_.get(), stops());
  if (!reward_) {  // a teacher judges tokens
    for (Rollout& rollout : rollouts) rollout.reward = 0;
    return std::vector<Judgement>(rollouts.size(), {.reward = 0, .right = {}});
  }
  const std::vector<Score> scores = reward_->of(rollouts, progress);
  add_scores(rollouts, scores);
  std::vector<Judgement> out;
  for (const Score& score : scores) {
    Judgement judgement{score.score, score.accuracy};
    if (!judgement.right && score.score) judgement.right = *score.score == 1 ? 1.0 : 0.0;
    out.push_back(judgement);
  }
  return out;
}

std::string FileQuestions::fingerprint() const {
  std::uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  const auto add = [&](std::uint64_t value) { hash = (hash ^ value) * 0x100000001b3u; };
  for (const auto* prompts : {&prompts_, &held_out_}) {
    add(prompts->size());
    for (const Prompt& prompt : *prompts) {
      add(prompt.ids.size());
      for (const std::int32_t id : prompt.ids) add(static_cast<std::uint32_t>(id));
    }
  }
  return text_of(std::hex, hash);
}

}  // namespace espalier
