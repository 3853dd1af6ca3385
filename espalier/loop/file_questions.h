// The user's prompts as questions of the closed loop: --prompts, --val-prompts, and --reward or --env.
#pragma once

#include <optional>

#include "espalier/loop/questions.h"
#include "espalier/services/reward_function.h"
#include "espalier/services/tokenizer.h"

namespace espalier {

class FileQuestions final : public Questions {
 public:
  FileQuestions(const Options& options, const std::filesystem::path& source, const ModelShape& shape,
                Progress& progress);

  // Goes through the file in a different order in every pass, a function of --seed and the pass.
  std::vector<Prompt> train(const Draw& draw, std::int64_t count) override;
  std::vector<Prompt> held_out() override { return held_out_; }
  std::vector<Judgement> judge(std::vector<Rollout>& rollouts, Progress& progress) override;
  std::int64_t longest_prompt() const override { return longest_; }
  const std::vector<std::int32_t>& stop_ids() const override { return stop_ids_; }
  StopStrings* stops() override { return stops_ ? &*stops_ : nullptr; }
  TurnTexts& turn_texts() override { return *turn_texts_; }
  std::string fingerprint() const override;

 private:
  std::vector<Prompt> read(const std::string& path, const std::string& columns, const ModelShape& shape,
                           Progress& progress);
  void shuffle(std::int64_t pass);

  std::int64_t seed_;
  LazyTokenizer tokenizer_;
  std::optional<RewardFunction> reward_;  // none with --env
  std::vector<Prompt> prompts_, held_out_;
  std::vector<std::size_t> order_;
  std::int64_t pass_ = -1;  // that order_ is of
  std::int64_t longest_ = 0;
  std::vector<std::int32_t> stop_ids_;
  std::optional<StopStrings> stops_;
  std::optional<TokenizerTexts> turn_texts_;
};

}  // namespace espalier
