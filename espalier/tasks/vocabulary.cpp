#include "espalier/tasks/vocabulary.h"

#include <charconv>

#include "espalier/base/error.h"

namespace espalier {
namespace {

constexpr std::string_view kMarks = "<end> ; ? is = + : copy with for";
constexpr std::string_view kDigits = "0 1 2 3 4 5 6 7 8 9";
constexpr std::string_view kNames =
    "acorn amber aspen badger birch bison cedar clover coral daisy dingo dove ebony elm ermine falcon "
    "fern finch gecko ginger grove hazel heron ibex iris jackal jade jasper kestrel kiwi koala lark "
    "lemur lotus maple marten moose nettle newt olive opal otter pearl poppy quail quartz raven robin "
    "saffron sparrow thistle tulip umber urchin vetch violet viper walnut willow yak yarrow zebra zinc zinnia";
constexpr std::string_view kColours =
    "black blue brown cyan gold green grey lime navy pink plum red rust teal white tan";
constexpr std::string_view kFillers =
    "the rain fell on quiet road while old men told tales of ships and storms "
    "under high moon light near stone walls where no bird sang all night long before dawn";

// Words between single spaces.
std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> words;
  while (!text.empty()) {
    const std::size_t space = text.find(' ');
    words.push_back(text.substr(0, space));
    text.remove_prefix(space == std::string_view::npos ? text.size() : space + 1);
  }
  return words;
}

}  // namespace

const Vocabulary& Vocabulary::built_in() {
  static const Vocabulary vocabulary;
  return vocabulary;
}

Vocabulary::Vocabulary() {
  add(kMarks);
  digits_ = add(kDigits);
  names_ = add(kNames);
  colours_ = add(kColours);
  fillers_ = add(kFillers);
  for (std::size_t i = 0; i < words_.size(); ++i)
    ESPALIER_INTERNAL(index_.emplace(words_[i], static_cast<std::int32_t>(i)).second, words_[i], " stands twice");
}

Vocabulary::Range Vocabulary::add(std::string_view words) {
  const auto begin = static_cast<std::int32_t>(words_.size());
  for (const std::string_view word : split(words)) words_.emplace_back(word);
  return {begin, static_cast<std::int32_t>(words_.size()) - begin};
}

std::int32_t Vocabulary::id(std::string_view word) const {
  const auto found = index_.find(word);
  ESPALIER_INTERNAL(found != index_.end(), "'", word, "' is no word of the built-in vocabulary");
  return found->second;
}

std::string Vocabulary::text(std::span<const std::int32_t> ids) const {
  std::string out;
  for (const std::int32_t id : ids) {
    if (!out.empty()) out += ' ';
    out += id >= 0 && id < size() ? words_[static_cast<std::size_t>(id)] : text_of('<', id, '>');
  }
  return out;
}

TokenIds Vocabulary::ids(std::string_view text, const std::string& where) const {
  TokenIds out;
  for (const std::string_view word : split(text)) {
    const auto found = index_.find(word);
    std::int32_t number = -1;
    if (found != index_.end())
      number = found->second;
    else if (word.size() > 2 && word.front() == '<' && word.back() == '>')
      std::from_chars(word.data() + 1, word.data() + word.size() - 1, number);
    if (number < 0) throw InputError({where, "words of the built-in vocabulary", "'" + std::string(word) + "'", ""});
    out.push_back(number);
  }
  return out;
}

}  // namespace espalier
