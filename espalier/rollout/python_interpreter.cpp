#include "espalier/rollout/python_interpreter.h"

#include <unistd.h>

#include <cstdlib>

namespace espalier {

std::string python_interpreter() {
  if (const char* const named = std::getenv("ESPALIER_PYTHON"); named != nullptr && *named != '\0') return named;
  const std::string built = ESPALIER_BUILD_PYTHON;
  return !built.empty() && ::access(built.c_str(), X_OK) == 0 ? built : "python3";
}

}  // namespace espalier
