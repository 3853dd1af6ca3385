// The name or the option that an unknown word most likely meant: a typing error, or the word that another trainer has
// for it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace espalier {

// The candidate with the fewest edits (a letter inserted, deleted, changed, or two neighbours swapped) from `name`, or
// "" if even that one is more than max(2, a third of the name) edits away, or has no letter in common. The first of
// equals wins.
std::string nearest_name(std::string_view name, const std::vector<std::string>& candidates);

// The one of `options` (names with '-') whose name, or whose name elsewhere ("learning-rate" for lr), is nearest to
// `name` by the rule of nearest_name; "" where none is near. '_' counts as '-'.
std::string nearest_option(std::string_view name, const std::vector<std::string>& options);

// Names of an option in other trainers: "learning-rate" for lr.
std::vector<std::string> names_elsewhere_of(const std::string& option);

}  // namespace espalier
