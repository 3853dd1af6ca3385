// Main memory of this process in bytes: held, peak, and still available. Source: proc(5), and the process's control
// groups (version 2 and 1). 0 or the largest number if the system does not report it.
#pragma once

#include <cstdint>
#include <filesystem>

namespace espalier {

std::int64_t resident_bytes();       // VmRSS
std::int64_t peak_resident_bytes();  // VmHWM

// Gives the system back what was freed and malloc still holds: with glibc blocks of up to 32 MiB, which would count as
// held by a later step. Elsewhere it does nothing.
void return_freed_memory();

// Bytes that the process could still allocate: the least of the machine's available memory and what each control
// group leaves below its limit (file pages count as free there: they are given back on demand).
std::int64_t available_bytes();

// The same, with another root in the place of "/": for tests.
std::int64_t available_bytes_below(const std::filesystem::path& root);

}  // namespace espalier
