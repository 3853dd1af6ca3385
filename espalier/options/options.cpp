// The table as rows and as members: the only file that turns names into members of Options.
#include "espalier/options/options.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/options/nearest_option.h"
#include "espalier/options/option_value.h"
#include "espalier/options/values_elsewhere.h"

namespace espalier {
namespace {

std::string text_of_value(const std::string& value) { return value; }
std::string text_of_value(double value) { return number_text(value); }
std::string text_of_value(std::int64_t value) { return std::to_string(value); }
std::string text_of_value(bool value) { return value ? "true" : "false"; }
template <class E>
std::string text_of_value(Choice<E> value) {
  return name_of(value);
}

void assign(std::string& member, const std::string& value, const std::string&) { member = value; }
void assign(double& member, const std::string& value, const std::string& where) {
  member = parse_number(value, where, "a number");
}
void assign(std::int64_t& member, const std::string& value, const std::string& where) {
  member = parse_integer(value, where, "a whole number");
}
void assign(bool& member, const std::string& value, const std::string& where) { member = parse_flag(value, where); }
template <class E>
void assign(Choice<E>& member, const std::string& value, const std::string& where) {
  const bool said = !value.empty() || words_of(E{}).front()[0] == '\0';  // an empty text is none of most words
  if (said) member = {value, where};
}

// A row's type and range. A choice is a text with its words as range.
namespace option_kind {
constexpr OptionType text = OptionType::text, number = OptionType::number, integer = OptionType::integer,
                     flag = OptionType::flag, list = OptionType::list, paths = OptionType::paths;
#define ESPALIER_CHOICE(Type, words) constexpr OptionType Type = OptionType::text;
#define ESPALIER_WORD(name, word)
#include "espalier/options/choices.def"
constexpr OptionType DType = text, AttentionKernels = text, PolicyLoss = text, KlLossType = text;
}  // namespace option_kind

template <class T>
const char* range_of(const T&, const char* range) {
  return range;
}
template <class E>
const char* range_of(Choice<E>, const char* range) {
  static const std::string words = joined(words_of(E{}));
  return *range != '\0' ? range : words.c_str();
}

#define ESPALIER_OPTION(field, name, type, value, range, unit, verbs, help) \
  static_assert(std::string_view(unit) != "path", name ": say whether the path is an input or an output");
#include "espalier/options/option_table.def"
#undef ESPALIER_OPTION

std::vector<OptionRow> make_rows() {
  const Options defaults;
  const char* section = "";
  std::vector<OptionRow> rows;
#define ESPALIER_SECTION(title) section = title;
#define ESPALIER_OPTION(field, name, type, value, range, unit, verbs, help)                                        \
  rows.push_back({#field, name, option_kind::type, text_of_value(defaults.field), range_of(defaults.field, range), \
                  unit, verbs, help, section});
#include "espalier/options/option_table.def"
#undef ESPALIER_OPTION
  return rows;
}

const OptionRow& row_of(const std::string& name, const std::string& where) {
  if (const OptionRow* row = find_option(name)) return *row;
  std::vector<std::string> names;
  for (const OptionRow& row : option_rows()) names.push_back(row.name);
  std::string asked = name;
  std::replace(asked.begin(), asked.end(), '_', '-');
  const std::string near = nearest_option(asked, names);
  throw OptionError({where + "--" + asked, "the name of an option", '"' + asked + '"',
                     near.empty() ? "espalier VERB --help lists them" : "did you mean --" + near + "?"});
}

}  // namespace

std::vector<std::string> split_paths(const std::string& text) {
  std::vector<std::string> out;
  for (std::size_t begin = 0; !text.empty() && begin <= text.size();) {
    const std::size_t end = std::min(text.find(kBetweenPaths, begin), text.size());
    out.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return out;
}

Options default_options([[maybe_unused]] char verb) {
  Options options;
#define ESPALIER_OPTION(field, name, type, value, range, unit, verbs, help)
#define ESPALIER_VERB_DEFAULT(letter, field, value) \
  if (verb == letter) options.field = value;
#include "espalier/options/option_table.def"
#undef ESPALIER_OPTION
  return options;
}

bool OptionRow::taken_by(char verb) const {
  return verbs[0] == '*' || std::strchr(verbs, verb) != nullptr || in_short_help_of(verb);
}

bool OptionRow::in_short_help_of(char verb) const {
  return verb >= 'a' && verb <= 'z' && std::strchr(verbs, verb - 'a' + 'A') != nullptr;
}

bool OptionRow::is_path() const {
  const std::string_view text = unit;
  return text.starts_with("input") || text.starts_with("output");
}

PathRole path_role(const OptionRow& row, char verb) {
  constexpr std::pair<std::string_view, PathRole> kRoles[] = {{"input", PathRole::input},
                                                              {"models", PathRole::models},
                                                              {"output file", PathRole::output_file},
                                                              {"output records", PathRole::output_records},
                                                              {"output folder", PathRole::output_folder},
                                                              {"output run", PathRole::output_run}};
  if (!row.is_path()) return PathRole::none;
  std::string_view rest = row.unit;
  while (true) {
    const std::string_view one = rest.substr(0, rest.find(", "));
    for (const auto& [words, role] : kRoles) {
      if (!one.starts_with(words)) continue;
      const std::string_view letters = one.substr(std::min(one.size(), words.size() + 1));
      if (letters.empty() || letters.find(verb) != letters.npos) return role;
    }
    if (one.size() == rest.size()) return PathRole::none;
    rest.remove_prefix(one.size() + 2);
  }
}

const std::vector<OptionRow>& option_rows() {
  static const std::vector<OptionRow> rows = make_rows();
  return rows;
}

const OptionRow* find_option(std::string_view name) {
  std::string field(name);
  std::replace(field.begin(), field.end(), '-', '_');
  for (const OptionRow& row : option_rows())
    if (field == row.field) return &row;
  return nullptr;
}

void set_option(Options& options, const std::string& name, const std::string& value) {
  set_option(options, name, value, "");
}

void set_option(Options& options, const std::string& name, const std::string& given, const std::string& where) {
  const OptionRow& row = row_of(name, where);
  const std::string place = where + "--" + row.name;
  const std::string value = own_word(row, given);
  check_value(row, value, place);
  const std::string_view field = row.field;
#define ESPALIER_OPTION(member, name, type, value_, range, unit, verbs, help) \
  if (field == #member) return assign(options.member, value, place);
#include "espalier/options/option_table.def"
#undef ESPALIER_OPTION
}

std::string option_text(const Options& options, const std::string& name) {
  const std::string_view field = row_of(name, "").field;
#define ESPALIER_OPTION(member, name, type, value, range, unit, verbs, help) \
  if (field == #member) return text_of_value(options.member);
#include "espalier/options/option_table.def"
#undef ESPALIER_OPTION
  ESPALIER_INTERNAL(false, "no member for option ", name);
  return "";
}

}  // namespace espalier
