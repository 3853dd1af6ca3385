#include "espalier/services/stop_strings.h"

#include <algorithm>
#include <utility>

#include "espalier/base/error.h"

namespace espalier {

// A token has at least one byte of text, but for a few that have none; some decoders drop a space at the beginning.
StopStrings::StopStrings(std::vector<std::string> texts, Tokenizer& tokenizer)
    : texts_(std::move(texts)), tokenizer_(tokenizer), newest_(8) {
  std::size_t longest = 0;
  for (const std::string& text : texts_) {
    if (text.empty()) throw OptionError({"--stop", "a text", "an empty one", "leave it out"});
    longest = std::max(longest, text.size());
  }
  newest_ += longest;
}

std::vector<std::uint8_t> StopStrings::completed(std::span<const std::span<const std::int32_t>> responses) {
  std::vector<std::span<const std::int32_t>> newest;
  for (const auto& tokens : responses) newest.push_back(tokens.last(std::min(newest_, tokens.size())));
  std::vector<std::uint8_t> out;
  for (const std::string& text : tokenizer_.decode(newest, true))
    out.push_back(
        std::ranges::any_of(texts_, [&](const std::string& stop) { return text.find(stop) != std::string::npos; }));
  return out;
}

std::string StopStrings::before(const std::string& response) const {
  std::size_t end = response.size();
  for (const std::string& stop : texts_) end = std::min(end, response.find(stop));
  return response.substr(0, end);
}

}  // namespace espalier
