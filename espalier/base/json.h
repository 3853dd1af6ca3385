// The one JSON type: members keep the order in which they were written.
#pragma once

#include <nlohmann/json.hpp>

namespace espalier {
using Json = nlohmann::ordered_json;
}
