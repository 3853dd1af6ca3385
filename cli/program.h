// The program as a function: options, checks, the verb, and every outcome turned into text or JSON and an exit code.
#pragma once

#include <string>
#include <vector>

namespace espalier::cli {

int run_program(const std::vector<std::string>& words);

}  // namespace espalier::cli
