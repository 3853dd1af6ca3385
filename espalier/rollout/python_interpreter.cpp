#include "espalier/rollout/python_interpreter.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string_view>

namespace espalier {

std::string python_interpreter() {
  if (const char* const named = std::getenv("ESPALIER_PYTHON"); named != nullptr && *named != '\0') return named;
  const std::string built = ESPALIER_BUILD_PYTHON;
  return !built.empty() && ::access(built.c_str(), X_OK) == 0 ? built : "python3";
}

std::vector<std::string> python_environment() {
  const char* const named = std::getenv("ESPALIER_PYTHON_PACKAGE");
  const std::string package = named != nullptr ? named : ESPALIER_PYTHON_PACKAGE;
  std::vector<std::string> out = {"PYTHONSAFEPATH=1"};  // keeps the current folder off the path
  std::string search;
  if (std::filesystem::is_directory(package)) search = package;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view variable = *entry;
    if (variable.starts_with("PYTHONSAFEPATH=")) continue;
    if (variable.starts_with("PYTHONPATH="))
      search.append(search.empty() ? "" : ":").append(variable.substr(std::strlen("PYTHONPATH=")));
    else
      out.emplace_back(variable);
  }
  if (!search.empty()) out.push_back("PYTHONPATH=" + search);
  return out;
}

std::vector<char*> null_terminated(std::vector<std::string>& texts) {
  std::vector<char*> out;
  for (std::string& text : texts) out.push_back(text.data());
  out.push_back(nullptr);
  return out;
}

}  // namespace espalier
