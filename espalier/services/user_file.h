// A Python file of the user's: what the errors of its service say (python/espalier/texts/user_file.py).
#pragma once

#include <string>

#include "espalier/base/json.h"

namespace espalier {

// `file`, where it exists. Errors: InputError that asks for a file with `holds`, given by `option`.
const std::string& existing_user_file(const std::string& file, const char* holds, const char* option);

int milliseconds(double seconds);  // of a time limit, at most three weeks

// "FILE:LINE" where the error {"kind", "message", "line", ...} names a line, else "FILE".
std::string line_of(const Json& error, const std::string& file);

// Throws InputError where Python could not read or import the file; `what` stands for it in messages.
void fail_if_unusable(const Json& error, const std::string& file, const char* what);

// The text in quotes, cut after 200 bytes or a little less: never inside a character.
std::string quoted_start(const std::string& text);

}  // namespace espalier
