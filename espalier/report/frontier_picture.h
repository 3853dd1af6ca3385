// The capacity frontier as one SVG file in the style of the report's page.
#pragma once

#include <string>

#include "espalier/plan/frontier.h"

namespace espalier {

// Longest prompts over the number of responses, a line for each way to run a step. Prompts stand on a logarithmic axis:
// the ways differ by factors. Readable by itself, in light and dark mode.
std::string frontier_picture(const Frontier& frontier);

}  // namespace espalier
