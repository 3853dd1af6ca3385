// The name a typing error most likely meant.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace espalier {

// The candidate with the fewest edits (a letter inserted, deleted, changed, or two neighbours swapped) from `name`, or
// "" where even that one is more than max(2, a third of the name) edits away. The first of equals wins.
std::string nearest_name(std::string_view name, const std::vector<std::string>& candidates);

}  // namespace espalier
