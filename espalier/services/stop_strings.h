// Texts that end a response (--stop), looked for in its text without special tokens.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "espalier/services/tokenizer.h"

namespace espalier {

class StopStrings {
 public:
  // Errors: OptionError where a text is empty.
  StopStrings(std::vector<std::string> texts, Tokenizer& tokenizer);

  // For each response, given by its tokens so far: whether its newest tokens complete one of the texts. Only as many
  // of the newest tokens are decoded as can hold the longest text, so a call costs the same at any length.
  std::vector<std::uint8_t> completed(std::span<const std::span<const std::int32_t>> responses);

  // The text before the first occurrence of any of the texts; all of it where there is none.
  std::string before(const std::string& response) const;

 private:
  std::vector<std::string> texts_;
  Tokenizer& tokenizer_;
  std::size_t newest_;  // tokens that can hold the longest text
};

}  // namespace espalier
