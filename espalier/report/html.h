// Text and numbers in the form of the page.
#pragma once

#include <string>
#include <string_view>

namespace espalier {

// `text` as content of an element or of an attribute in double quotes: markup characters become entities, control
// characters other than tab and line end become U+FFFD. `text` is UTF-8.
std::string escaped(std::string_view text);

enum class Unit { number, percent, seconds, count, bytes };

// number: four significant digits; percent: of a share in [0, 1]; others: espalier/base/units.h.
std::string shown(double value, Unit unit);

// A number inside SVG: at most two decimals.
std::string coordinate(double value);

}  // namespace espalier
