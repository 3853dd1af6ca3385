// The one JSON type, whole.
#pragma once

#include <nlohmann/json.hpp>

#include "espalier/base/json_fwd.h"
