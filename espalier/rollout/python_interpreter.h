// The Python that Espalier runs as a child: for formats that only Python reads, for text and for rewards.
#pragma once

#include <string>
#include <vector>

namespace espalier {

// What ESPALIER_PYTHON names, else the one of the build where it is still there, else python3 of the search path.
std::string python_interpreter();

// This process's environment, with the source tree's package first on PYTHONPATH where the tree still exists, and the
// current folder off it.
std::vector<std::string> python_environment();

}  // namespace espalier
