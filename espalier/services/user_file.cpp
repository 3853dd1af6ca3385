#include "espalier/services/user_file.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "espalier/base/error.h"
#include "espalier/rollout/python_interpreter.h"

namespace espalier {

const std::string& existing_user_file(const std::string& file, const char* holds, const char* option) {
  std::error_code unreadable;
  if (!std::filesystem::is_regular_file(file, unreadable))
    throw InputError(
        {file, std::string("a Python file with ") + holds, "no such file", std::string("correct ") + option});
  return file;
}

int milliseconds(double seconds) { return static_cast<int>(std::min(std::ceil(seconds * 1000), 2e9)); }

std::string line_of(const Json& error, const std::string& file) {
  return error.contains("line") && error["line"].is_number() ? text_of(file, ":", error["line"].get<int>()) : file;
}

void fail_if_unusable(const Json& error, const std::string& file, const char* what) {
  const std::string kind = error["kind"], message = error["message"], where = line_of(error, file);
  if (error.contains("package"))
    throw InputError({where, std::string("packages that ") + what + " imports", message,
                      python_interpreter() + " -m pip install " + error["package"].get<std::string>() +
                          ", or set ESPALIER_PYTHON to a Python that has it"});
  if (kind == "syntax") throw InputError({where, "valid Python", message, "correct the file"});
  if (kind == "import")
    throw InputError({where, "a file that Python can import", message, "it is run by " + python_interpreter()});
}

std::string quoted_start(const std::string& text) {
  constexpr std::size_t kMost = 200;
  std::size_t kept = std::min(kMost, text.size());
  while (kept < text.size() && (text[kept] & 0xc0) == 0x80) --kept;
  return "'" + text.substr(0, kept) + (kept < text.size() ? "...'" : "'");
}

}  // namespace espalier
