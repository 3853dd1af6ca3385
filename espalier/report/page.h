// The report of a run as one HTML file that needs nothing else: no script, no font, no picture from elsewhere. Readable
// from a width of 360 pixels on, in light and dark mode, and in print.
#pragma once

#include <string>

#include "espalier/report/run_record.h"

namespace espalier {

std::string page_of(const RunRecord& run);

}  // namespace espalier
