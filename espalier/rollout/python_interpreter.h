// The Python that Espalier runs as a child: for formats that only Python reads, for text and for rewards.
#pragma once

#include <string>
#include <vector>

namespace espalier {

// What ESPALIER_PYTHON names, else the one of the build where it is still there, else python3 of the search path.
std::string python_interpreter();

// This process's environment with the current folder off the search path, and first on PYTHONPATH the folder of our
// package: what ESPALIER_PYTHON_PACKAGE names (an installed package does), else the source tree's where it still
// exists.
std::vector<std::string> python_environment();

// Arguments or an environment as the system takes them, as long as the texts exist.
std::vector<char*> null_terminated(std::vector<std::string>& texts);

}  // namespace espalier
