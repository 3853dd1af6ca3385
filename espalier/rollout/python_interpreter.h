// The Python that Espalier runs as a child: for formats that only Python reads, for text and for rewards.
#pragma once

#include <string>
#include <vector>

namespace espalier {

// The Python of ESPALIER_PYTHON, else that of the build where it still exists, else python3 on the search path.
std::string python_interpreter();

// This process's environment with the current folder off the search path, and first on PYTHONPATH the folder of our
// package: what ESPALIER_PYTHON_PACKAGE names (an installed package does), else the source tree's where it still
// exists.
std::vector<std::string> python_environment();

// Arguments or an environment as the system takes them, as long as the texts exist.
std::vector<char*> null_terminated(std::vector<std::string>& texts);

}  // namespace espalier
