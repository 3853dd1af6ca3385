// Items of lists of names in options: names of parts, or expressions.
#pragma once

#include <string>
#include <vector>

namespace espalier {

// At commas outside of brackets.
std::vector<std::string> split_names(const std::string& words);

// True for letters, digits and "_" alone. Anything else is an expression.
bool is_plain_name(const std::string& item);
// The same with dots between names.
bool is_dotted_name(const std::string& item);

// True if `part` is a name between dots, or the first one, of a longer name.
bool has_part(const std::string& name, const std::string& part);

}  // namespace espalier
