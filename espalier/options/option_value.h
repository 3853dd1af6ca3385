// Valid texts of one option: its type, its choices or its range. Internal to the folder.
#pragma once

#include <string>

#include "espalier/options/options.h"

namespace espalier {

// Errors: OptionError naming `where` (for a person: "--lr"), what the row takes and `value`.
void check_value(const OptionRow& row, const std::string& value, const std::string& where);

double parse_number(const std::string& text, const std::string& where, const std::string& expected);
std::int64_t parse_integer(const std::string& text, const std::string& where, const std::string& expected);
bool parse_flag(const std::string& text, const std::string& where);

// True if another trainer's value says that there is none: none, None or null.
inline bool is_none(const std::string& value) { return value == "none" || value == "None" || value == "null"; }

// The shortest text that reads back as the same double: 1e-6, 0.2, 3.
std::string number_text(double value);

// The values that the row takes, for a person: "one of cpu, cuda", "a number in [0, 1]", "a path".
std::string description_of(const OptionRow& row);

bool has_choices(const OptionRow& row);  // the range column lists words rather than an interval

}  // namespace espalier
