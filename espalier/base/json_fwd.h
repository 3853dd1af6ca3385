// The one JSON type by name alone, for headers: base/json.h takes seconds to compile.
#pragma once

#include <nlohmann/json_fwd.hpp>

namespace espalier {
using Json = nlohmann::ordered_json;  // members keep the order in which they were written
}
