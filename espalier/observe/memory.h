// Main memory: what this process holds, what it held at most, what it could still take. In bytes. Source: proc(5),
// and the control groups (version 2 and 1) the process is in. 0 or the largest number where the system does not say.
#pragma once

#include <cstdint>
#include <filesystem>

namespace espalier {

std::int64_t resident_bytes();       // VmRSS
std::int64_t peak_resident_bytes();  // VmHWM

// Bytes that the process could still allocate: the least of the machine's available memory and what each control
// group leaves below its limit (file pages count as free there: they are given back on demand).
std::int64_t available_bytes();

// The same, with another root in the place of "/": for tests.
std::int64_t available_bytes_below(const std::filesystem::path& root);

}  // namespace espalier
