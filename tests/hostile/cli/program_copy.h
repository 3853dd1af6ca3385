// A copy of a process that becomes the program: the start of torch's library, most of a small run, is saved.
#pragma once

#include <string>
#include <vector>

namespace espalier::testing {

// In the copy: takes the folder, and the files as standard input, output and error; signals are as a shell starts a
// program with them. Where that fails the copy ends with status 126.
void enter_copy(const std::string& folder, int in, int out, int err);

// Runs the program's function with these words and ends the copy with its exit code.
[[noreturn]] void become_the_program(const std::vector<std::string>& words);

}  // namespace espalier::testing
