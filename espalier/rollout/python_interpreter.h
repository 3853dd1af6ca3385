// The Python that Espalier runs as a child: for formats that only Python reads, and for rewards.
#pragma once

#include <string>

namespace espalier {

// What ESPALIER_PYTHON names, else the one of the build where it is still there, else python3 of the search path.
std::string python_interpreter();

}  // namespace espalier
