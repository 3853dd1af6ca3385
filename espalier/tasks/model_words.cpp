#include "espalier/tasks/model_words.h"

#include "espalier/base/error.h"
#include "espalier/checkpoint/json_file.h"
#include "espalier/tasks/vocabulary.h"

namespace espalier {
namespace {

constexpr const char* kRemedy =
    "give --prompts and --reward for a model with its own tokenizer, or leave --model out for a fresh one";

// Words and their ids; empty for a tokenizer without such a table (Unigram).
std::unordered_map<std::string, std::int64_t> words_of(const Json& tokenizer) {
  std::unordered_map<std::string, std::int64_t> out;
  const Json vocabulary = tokenizer.value("/model/vocab"_json_pointer, Json());
  if (vocabulary.is_object())
    for (const auto& [word, id] : vocabulary.items())
      if (id.is_number_integer()) out.emplace(word, id.get<std::int64_t>());
  for (const Json& added : tokenizer.value("added_tokens", Json::array()))
    if (added.is_object() && added.contains("content") && added.contains("id"))
      out.emplace(added["content"].get<std::string>(), added["id"].get<std::int64_t>());
  return out;
}

}  // namespace

void check_words(const std::filesystem::path& model, const ModelShape& shape) {
  const std::vector<std::string>& words = Vocabulary::built_in().words();
  const std::filesystem::path file = model / "tokenizer.json";
  std::error_code absent;
  if (std::filesystem::is_regular_file(file, absent)) {
    const auto known = words_of(read_json_object(file));
    std::vector<std::string> lacking;
    for (std::size_t id = 0; id < words.size(); ++id) {
      const auto found = known.find(words[id]);
      if (found == known.end() || found->second != static_cast<std::int64_t>(id)) lacking.push_back(words[id]);
    }
    if (lacking.empty()) return;
    std::string first;
    for (std::size_t i = 0; i < std::min<std::size_t>(3, lacking.size()); ++i)
      first += (i > 0 ? ", '" : "'") + lacking[i] + "'";
    throw InputError(
        {file.string(), text_of("the ", words.size(), " words of the built-in tasks as its first tokens"),
         text_of("a tokenizer without ", lacking.size(), " of them (", first, lacking.size() > 3 ? ", ...)" : ")"),
         kRemedy});
  }
  if (shape.vocabulary < static_cast<std::int64_t>(words.size()))
    throw InputError({model.string(), text_of("a token for each of the ", words.size(), " words of the built-in tasks"),
                      text_of(shape.vocabulary, " tokens: none for '",
                              words[static_cast<std::size_t>(shape.vocabulary)], "' and later words"),
                      kRemedy});
}

}  // namespace espalier
