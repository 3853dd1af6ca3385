// The text of turns, and the tokens of observations.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "espalier/services/tokenizer.h"

namespace espalier {

class TurnTexts {
 public:
  using Where = std::function<std::string(std::size_t)>;  // of an item, for messages
  virtual ~TurnTexts() = default;

  // Without special tokens.
  virtual std::vector<std::string> read(std::span<const std::span<const std::int32_t>> turns) = 0;
  virtual std::vector<std::vector<std::int32_t>> observations(std::span<const Observation> observations,
                                                              const Where& where) = 0;
  // Chats rendered whole (Tokenizer::render); only prompts that are lists of messages have them.
  virtual std::vector<RenderedChat> rendered(std::span<const RenderedTurn> turns, const Where& where) = 0;
  // Prompts that are lists of messages: chat_of each.
  virtual std::vector<EncodedPrompt> prompts(std::span<const std::string> messages, const Where& where) = 0;
};

// By the model's tokenizer and chat template.
class TokenizerTexts final : public TurnTexts {
 public:
  explicit TokenizerTexts(Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  std::vector<std::string> read(std::span<const std::span<const std::int32_t>> turns) override {
    return tokenizer_.decode(turns, true);
  }
  std::vector<std::vector<std::int32_t>> observations(std::span<const Observation> observations,
                                                      const Where& where) override {
    return tokenizer_.encode_observations(observations, where);
  }
  std::vector<RenderedChat> rendered(std::span<const RenderedTurn> turns, const Where& where) override {
    return tokenizer_.render(turns, where);
  }
  std::vector<EncodedPrompt> prompts(std::span<const std::string> messages, const Where& where) override {
    return tokenizer_.encode(messages, where);
  }

 private:
  Tokenizer& tokenizer_;
};

}  // namespace espalier
