#include "espalier/settings/config_file.h"

#define TOML_EXCEPTIONS 1
#include <toml++/toml.h>
#include <algorithm>
#include <fstream>
#include <sstream>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/options/nearest_option.h"
#include "espalier/options/option_value.h"
#include "espalier/settings/trl_names.h"

namespace espalier {
namespace {

std::string place_of(const std::string& path, const toml::source_region& source) {
  return text_of(path, ":", source.begin.line, ": ");
}

std::string scalar_text(const toml::node& node, const std::string& place) {
  if (const auto* value = node.as_string()) return value->get();
  if (const auto* value = node.as_integer()) return std::to_string(value->get());
  if (const auto* value = node.as_floating_point()) return number_text(value->get());
  if (const auto* value = node.as_boolean()) return value->get() ? "true" : "false";
  std::ostringstream kind;
  kind << node.type();
  throw OptionError({place, "a string, a number, true, false or an array of numbers", kind.str(), ""});
}

std::string text_of_node(const toml::node& node, char between, const std::string& place) {
  const toml::array* array = node.as_array();
  if (!array) return scalar_text(node, place);
  std::string text;
  for (const toml::node& element : *array) {
    if (!text.empty()) text += between;
    text += scalar_text(element, place);
  }
  return text;
}

bool taken_by(const std::string& name, char letter) {
  if (const OptionRow* row = find_option(name)) return row->taken_by(letter);
  for (const std::string& target : alias_targets(name))
    if (find_option(target)->taken_by(letter)) return true;
  return false;
}

void check_known(const std::string& name, const std::string& place, const std::vector<std::string>& verbs) {
  if (find_option(name) || is_alias(name)) return;
  std::vector<std::string> names = verbs;
  for (const OptionRow& row : option_rows()) names.push_back(row.name);
  const std::string near = nearest_option(name, names);
  throw OptionError({place + name, "the name of an option or of a verb", '"' + name + '"',
                     near.empty() ? "docs/options.md lists them" : "did you mean " + near + "?"});
}

class ConfigReader {
 public:
  ConfigReader(const std::string& path, const std::string& verb, char letter, const std::vector<std::string>& verbs)
      : path_(path), verb_(verb), letter_(letter), verbs_(verbs) {}

  std::vector<OptionSetting> read(const toml::table& root) {
    for (const auto& [key, node] : root) {
      const std::string name(key.str());
      if (!is_table_of_verb(name, node)) add(name, node, false);
    }
    for (const auto& [key, node] : root) {
      const std::string name(key.str());
      if (is_table_of_verb(name, node)) add_table(name, node);
    }
    return settings_;
  }

 private:
  // --train is also the name of a verb: `train = "norms"` is the option, `[train]` the table.
  bool is_table_of_verb(const std::string& name, const toml::node& node) const {
    return std::find(verbs_.begin(), verbs_.end(), name) != verbs_.end() && (node.is_table() || !find_option(name));
  }

  void add_table(const std::string& name, const toml::node& node) {
    const std::string place = place_of(path_, node.source());
    const toml::table* table = node.as_table();
    if (!table) throw OptionError({place + name, "a table [" + name + "]", "a value", ""});
    for (const auto& [key, member] : *table) {
      check_known(std::string(key.str()), place_of(path_, member.source()), {});
      if (name == verb_) add(std::string(key.str()), member, true);
    }
  }

  void add(const std::string& name, const toml::node& node, bool own_table) {
    const std::string place = place_of(path_, node.source());
    check_known(name, place, verbs_);
    const OptionRow* row = find_option(name);
    const char between = row && row->type == OptionType::paths ? kBetweenPaths : ',';
    const std::string text = text_of_node(node, between, place + name);
    if (taken_by(name, letter_))
      settings_.push_back({name, text, place});
    else if (own_table)
      throw OptionError({place + name, "an option of " + verb_, "an option of other verbs", ""});
  }

  const std::string& path_;
  const std::string& verb_;
  char letter_;
  const std::vector<std::string>& verbs_;
  std::vector<OptionSetting> settings_;
};

std::string toml_value(const OptionRow& row, const std::string& text) {
  if (row.type == OptionType::list && !text.empty()) {
    std::string out;
    for (const double number : parse_numbers(row.name, text)) out += (out.empty() ? "[" : ", ") + number_text(number);
    return out + "]";
  }
  if (row.type != OptionType::text && row.type != OptionType::list && row.type != OptionType::paths) return text;
  const std::vector<std::string> paths = row.type == OptionType::paths ? split_paths(text) : std::vector<std::string>();
  // JSON's strings are TOML's, and its arrays of them; what is no UTF-8 neither can hold.
  return (paths.size() > 1 ? Json(paths) : Json(text)).dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace

std::vector<OptionSetting> read_config(const std::string& path, const std::string& verb, char letter,
                                       const std::vector<std::string>& verbs) {
  std::ifstream file(path, std::ios::binary);
  std::string content;
  for (std::string line; std::getline(file, line);) content += line + '\n';
  if (!file.eof()) throw InputError({path, "a readable configuration file (TOML)", "none", "check --config"});
  try {
    return ConfigReader(path, verb, letter, verbs).read(toml::parse(content, path));
  } catch (const toml::parse_error& error) {
    throw OptionError({text_of(path, ":", error.source().begin.line), "TOML", std::string(error.description()), ""});
  }
}

std::string config_text(const Options& options, const std::string& verb, char letter) {
  std::string out = "# espalier " + verb + " --config FILE\n";
  std::string_view section;
  for (const OptionRow& row : option_rows()) {
    if (!row.taken_by(letter)) continue;
    if (section != row.section) out += text_of("\n# ", section = row.section, "\n");
    out += text_of(row.name, " = ", toml_value(row, option_text(options, row.name)), "\n");
  }
  return out;
}

}  // namespace espalier
