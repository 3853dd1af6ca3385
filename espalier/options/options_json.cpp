#include "espalier/options/options_json.h"

#include <cmath>

#include "espalier/base/error.h"
#include "espalier/options/option_value.h"

namespace espalier {
namespace {

Json value_of(const OptionRow& row, const std::string& text) {
  switch (row.type) {
    case OptionType::number: {
      const double value = parse_number(text, row.name, "a number");
      return std::isfinite(value) ? Json(value) : Json(text);  // JSON has no infinity
    }
    case OptionType::integer:
      return parse_integer(text, row.name, "a whole number");
    case OptionType::flag:
      return parse_flag(text, row.name);
    case OptionType::list:
      return parse_numbers(row.name, text);
    case OptionType::paths: {  // one as a text, several as an array
      const std::vector<std::string> paths = split_paths(text);
      return paths.size() > 1 ? Json(paths) : Json(text);
    }
    case OptionType::text:
      break;
  }
  return text;
}

std::string text_of_json(const Json& value, bool paths, const std::string& place) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number_float()) return number_text(value.get<double>());
  if (value.is_number() || value.is_boolean()) return value.dump();
  if (!value.is_array())
    throw OptionError({place, "a string, a number, true, false or an array", value.type_name(), ""});
  std::string text;
  for (const Json& element : value) {
    if (paths ? !element.is_string() : !element.is_number())
      throw OptionError({place, paths ? "paths in the array" : "numbers in the array", element.type_name(), ""});
    if (!text.empty()) text += paths ? kBetweenPaths : ',';
    text += text_of_json(element, paths, place);
  }
  return text;
}

}  // namespace

Json options_to_json(const Options& options, char verb) {
  Json json = Json::object();
  for (const OptionRow& row : option_rows())
    if (verb == '\0' || row.taken_by(verb)) json[row.field] = value_of(row, option_text(options, row.field));
  return json;
}

Options options_from_json(const Json& json, const std::string& where) {
  if (!json.is_object()) throw OptionError({where, "an object of options", json.type_name(), ""});
  Options options;
  for (const auto& [name, value] : json.items()) {
    const OptionRow* row = find_option(name);
    const bool paths = row && row->type == OptionType::paths;
    set_option(options, name, text_of_json(value, paths, where + ": " + name), where + ": ");
  }
  return options;
}

}  // namespace espalier
