// The control groups a process is in, as directories from its own up to the root. Internal to the folder.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace espalier {

// Directories below root/sys/fs/cgroup that hold this process's limits: its own group first, then the enclosing ones.
// `controller` is "memory" or "cpu" (version 1 keeps one tree a controller; version 2 has a single tree). In a
// container the group's path may not be visible; then only the mount's root is used, which is the container's.
std::vector<std::filesystem::path> control_group_directories(const std::filesystem::path& root,
                                                             const std::string& controller);

// The first word of a small file, "" where there is none; and the number it spells, if it is one.
std::string first_word(const std::filesystem::path& file);
std::optional<std::int64_t> number_in(const std::filesystem::path& file);

}  // namespace espalier
