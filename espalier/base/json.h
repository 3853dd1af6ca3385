// The one JSON type, whole. Reading and writing text is compiled once, in json.cpp: a file that includes this header
// takes a second less to compile.
#pragma once

#include <nlohmann/json.hpp>

#include "espalier/base/json_fwd.h"

namespace espalier {
using JsonText = nlohmann::detail::iterator_input_adapter<std::string::const_iterator>;
}

extern template class nlohmann::detail::lexer<espalier::Json, espalier::JsonText>;
extern template class nlohmann::detail::parser<espalier::Json, espalier::JsonText>;
extern template class nlohmann::detail::serializer<espalier::Json>;
