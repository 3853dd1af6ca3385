// The words that the built-in tasks are written in. A token is a word; text is words with one space between them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace espalier {

using TokenIds = std::vector<std::int32_t>;

class Vocabulary {
 public:
  static const Vocabulary& built_in();
  Vocabulary(const Vocabulary&) = delete;
  Vocabulary& operator=(const Vocabulary&) = delete;

  std::int64_t size() const { return static_cast<std::int64_t>(words_.size()); }
  const std::vector<std::string>& words() const { return words_; }
  std::int32_t end() const { return 0; }                                // "<end>", what ends a response
  std::int32_t id(std::string_view word) const;                         // InternalError for a word that is none
  std::string text(std::span<const std::int32_t> ids) const;            // ids of a larger vocabulary as "<812>"
  TokenIds ids(std::string_view text, const std::string& where) const;  // inverse of text(); InputError at `where`

  // Words of one kind, a contiguous range of ids.
  struct Range {
    std::int32_t begin = 0, count = 0;
    std::int32_t at(std::int64_t index) const { return begin + static_cast<std::int32_t>(index); }
    bool holds(std::int32_t id) const { return id >= begin && id < begin + count; }
  };
  Range digits() const { return digits_; }    // "0" ... "9"
  Range names() const { return names_; }      // the words that facts are about
  Range colours() const { return colours_; }  // the words that facts give to names
  Range fillers() const { return fillers_; }  // the words between facts

 private:
  Vocabulary();
  Range add(std::string_view words);

  std::vector<std::string> words_;
  std::unordered_map<std::string_view, std::int32_t> index_;  // keys lie in words_
  Range digits_, names_, colours_, fillers_;
};

}  // namespace espalier
