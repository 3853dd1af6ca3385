#include "espalier/base/json.h"

template class nlohmann::detail::lexer<espalier::Json, espalier::JsonText>;
template class nlohmann::detail::parser<espalier::Json, espalier::JsonText>;
template class nlohmann::detail::serializer<espalier::Json>;
