#include "espalier/options/option_help.h"

#include <algorithm>
#include <cstring>
#include <sstream>

#include "espalier/options/option_value.h"
#include "espalier/options/options.h"
#include "espalier/options/settings.h"

namespace espalier {
namespace {

const char* word_of(const OptionRow& row) {
  switch (row.type) {
    case OptionType::number:
      return "X";
    case OptionType::integer:
      return "N";
    case OptionType::list:
      return "X,X";
    case OptionType::flag:
      return "";
    case OptionType::text:
      break;
  }
  if (has_choices(row)) return "WORD";
  const std::string_view unit = row.unit;
  return unit == "bytes" ? "SIZE" : unit == "path" ? "PATH" : "TEXT";
}

std::string default_of(const OptionRow& row) {
  if (row.type == OptionType::flag) return row.default_text == "true" ? "on" : "off";
  if (row.default_text.empty()) return "";
  std::string text = row.default_text;
  if (row.unit[0] != '\0' && std::string_view(row.unit) != "path") text += std::string(" ") + row.unit;
  return text;
}

// "text" in lines of at most `width`, each after `indent` spaces; the first line is begun by the caller.
std::string wrapped(const std::string& text, std::size_t indent, std::size_t width) {
  std::istringstream words(text);
  std::string out, word;
  std::size_t column = indent;
  while (words >> word) {
    if (column > indent && column + 1 + word.size() > width) {
      out += '\n' + std::string(indent, ' ');
      column = indent;
    }
    if (column > indent) out += ' ', ++column;
    out += word;
    column += word.size();
  }
  return out;
}

std::string with_spaces(std::string choices) {
  for (std::size_t at = 0; (at = choices.find('|', at)) != choices.npos; at += 3) choices.replace(at, 1, " | ");
  return choices;
}

}  // namespace

std::string option_help(char verb, std::size_t width) {
  constexpr std::size_t kIndent = 30;
  std::string out;
  const char* section = nullptr;
  for (const OptionRow& row : option_rows()) {
    if (!row.taken_by(verb)) continue;
    if (!section || std::strcmp(section, row.section) != 0) {
      section = row.section;
      out += std::string("\n") + section + ":\n";
    }
    std::string head = std::string("  --") + row.name + ' ' + word_of(row);
    head.resize(std::max(kIndent, head.size() + 1), ' ');
    if (head.size() > kIndent) head += '\n' + std::string(kIndent, ' ');
    std::string text = row.help;
    if (has_choices(row)) text += ": " + with_spaces(row.range);
    const std::string value = default_of(row);
    if (!value.empty()) text += " [" + value + "]";
    out += head + wrapped(text, kIndent, width) + '\n';
  }
  return out;
}

const std::vector<VerbName>& verb_names() {
  static const std::vector<VerbName> names = {{'i', "inspect"},  {'c', "convert"}, {'p', "plan"},  {'t', "train"},
                                              {'s', "score"},    {'v', "verify"},  {'b', "bench"}, {'r', "replay"},
                                              {'g', "generate"}, {'l', "grpo"},    {'o', "report"}};
  return names;
}

std::string option_docs() {
  std::string out =
      "# Options\n\nEvery option, its values and its default. On the command line an option is `--name value`; in a\n"
      "file given with `--config` it is `name = value` (TOML, at the top or in a table named after a verb; the\n"
      "command line wins); in Python it is the keyword `name` with `_` for `-`. This page is generated from\n"
      "`espalier/options/option_table.def` by the target `option_docs`.\n";
  const char* section = nullptr;
  for (const OptionRow& row : option_rows()) {
    if (!section || std::strcmp(section, row.section) != 0) {
      section = row.section;
      out += std::string("\n## ") + section + "\n\n| option | values | default | verbs | meaning |\n";
      out += "| --- | --- | --- | --- | --- |\n";
    }
    std::string taken;
    for (const VerbName& verb : verb_names())
      if (row.verbs[0] != '*' && row.taken_by(verb.letter))
        taken += (taken.empty() ? "" : ", ") + std::string(verb.name);
    std::string values = has_choices(row) ? with_spaces(row.range) : description_of(row);
    for (std::size_t at = 0; (at = values.find(" | ", at)) != values.npos; at += 2) values.replace(at, 3, ", ");
    const std::string value = default_of(row);
    out += std::string("| `--") + row.name + "` | " + values + " | " + (value.empty() ? "" : '`' + value + '`') +
           " | " + (row.verbs[0] == '*' ? "all" : taken) + " | " + row.help + " |\n";
  }
  out += "\n## Names of TRL\n\nAccepted with a note, on the command line and in files:\n\n";
  out += "| TRL | read as |\n| --- | --- |\n";
  for (const std::string& alias : alias_names()) {
    std::string targets;
    for (const std::string& target : alias_targets(alias))
      targets += (targets.empty() ? "`--" : ", `--") + target + '`';
    out += "| `" + alias + "` | " + targets + " |\n";
  }
  return out;
}

}  // namespace espalier
