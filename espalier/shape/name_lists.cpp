#include "espalier/shape/name_lists.h"

#include <algorithm>

namespace espalier {

std::vector<std::string> split_names(const std::string& words) {
  std::vector<std::string> items(1);
  int depth = 0;
  for (const char c : words) {
    if (c == '(' || c == '[' || c == '{') ++depth;
    if (c == ')' || c == ']' || c == '}') --depth;
    if (c == ',' && depth <= 0)
      items.emplace_back();
    else if (c != ' ' || depth > 0)
      items.back() += c;
  }
  return items;
}

bool is_plain_name(const std::string& item) {
  return std::ranges::all_of(item, [](char c) {
    return c == '_' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
  });
}

bool is_dotted_name(const std::string& item) {
  std::string names = item;
  std::erase(names, '.');
  return is_plain_name(names);
}

bool has_part(const std::string& name, const std::string& part) {
  const std::size_t at = ("." + name).find("." + part + ".");
  return at != std::string::npos;
}

}  // namespace espalier
