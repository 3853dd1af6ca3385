// The value of --columns: NAME=COLUMN,..., the user's names of columns for the names that are read.
#pragma once

#include <initializer_list>
#include <map>
#include <string>
#include <string_view>

#include "espalier/options/options.h"

namespace espalier {

// Column -> name. Errors: OptionError for text of another form, a name that is not `allowed`, and a name or a column
// that is given twice.
std::map<std::string, std::string, std::less<>> column_names(const std::string& text,
                                                             std::initializer_list<std::string_view> allowed);

// Errors: OptionError where --columns is given, although nothing that is read has columns.
void require_no_columns(const Options& options);

}  // namespace espalier
