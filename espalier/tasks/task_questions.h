// A built-in task as questions of the closed loop.
#pragma once

#include <optional>

#include "espalier/loop/questions.h"
#include "espalier/services/reward_function.h"
#include "espalier/tasks/task.h"

namespace espalier {

Task task_of(const Options& options);

// A word is a token, and <end> is no word.
class TaskTexts final : public TurnTexts {
 public:
  std::vector<std::string> read(std::span<const std::span<const std::int32_t>> turns) override;
  std::vector<std::vector<std::int32_t>> observations(std::span<const Observation> observations,
                                                      const Where& where) override;
  std::vector<RenderedChat> rendered(std::span<const RenderedTurn> turns, const Where& where) override;
  std::vector<EncodedPrompt> prompts(std::span<const std::string> messages, const Where& where) override;
};

class TaskQuestions final : public Questions {
 public:
  // Rewards are the task's own, or from --reward.
  explicit TaskQuestions(const Options& options);

  std::vector<Prompt> train(const Draw& draw, std::int64_t count) override;
  std::vector<Prompt> held_out() override;
  std::vector<Judgement> judge(std::vector<Rollout>& rollouts, Progress& progress) override;
  std::int64_t longest_prompt() const override { return task_.prompt_length; }
  const std::vector<std::int32_t>& stop_ids() const override { return stop_ids_; }
  TurnTexts& turn_texts() override { return turn_texts_; }
  std::string fingerprint() const override { return ""; }

 private:
  Prompt prompt_of(const Problem& problem) const;

  Task task_;
  std::int64_t seed_, val_size_;
  std::optional<RewardFunction> reward_;
  TaskTexts turn_texts_;
  std::vector<std::int32_t> stop_ids_{Vocabulary::built_in().end()};
};

}  // namespace espalier
