// The one JSON type, whole. Reading and writing text is compiled once, in json.cpp: a file that includes this header
// takes a second less to compile.
#pragma once

// The library's literal ""_json is an inline function: GCC would compile all that it calls, a whole reader, for each
// file that includes this one, 0.4 s long. As a template that nobody calls its body costs nothing. (Newer releases
// write the name so that no macro finds it.)
#define _json(text, size) \
  _json(text, size);      \
  template <typename>     \
  nlohmann::json value_of_text(text, size)
#include <nlohmann/json.hpp>
#undef _json

#include "espalier/base/json_fwd.h"

namespace espalier {
using JsonText = nlohmann::detail::iterator_input_adapter<std::string::const_iterator>;
}

extern template class nlohmann::detail::lexer<espalier::Json, espalier::JsonText>;
extern template class nlohmann::detail::parser<espalier::Json, espalier::JsonText>;
extern template class nlohmann::detail::serializer<espalier::Json>;
