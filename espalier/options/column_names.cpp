#include "espalier/options/column_names.h"

#include <algorithm>
#include <set>

#include "espalier/base/error.h"

namespace espalier {

std::map<std::string, std::string, std::less<>> column_names(const std::string& text,
                                                             std::initializer_list<std::string_view> allowed) {
  std::map<std::string, std::string, std::less<>> out;
  std::set<std::string> names;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size()), equals = text.find('=', begin);
    const std::string part = text.substr(begin, end - begin);
    const auto wrong = [&](const char* remedy) {
      std::string known;
      for (const std::string_view name : allowed) known.append(known.empty() ? "" : ", ").append(name);
      return OptionError({"--columns", "NAME=COLUMN,..., each NAME one of " + known, '"' + part + '"', remedy});
    };
    if (equals >= end || equals == begin || equals + 1 == end) throw wrong("as prompt=question");
    const std::string name = text.substr(begin, equals - begin);
    if (std::ranges::find(allowed, name) == allowed.end()) throw wrong("");
    if (!names.insert(name).second) throw wrong("give each name once");
    if (!out.emplace(text.substr(equals + 1, end - equals - 1), name).second) throw wrong("give each column once");
    begin = end + 1;
  }
  return out;
}

void require_no_columns(const Options& options) {
  if (!options.columns.empty())
    throw OptionError({"--columns", "rows of text: --objective dpo, reward or sft", '"' + options.columns + '"',
                       "leave it out, or give the objective"});
}

}  // namespace espalier
