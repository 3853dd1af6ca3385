#include "espalier/machine/control_group.h"

#include <charconv>
#include <fstream>
#include <sstream>

namespace espalier {
namespace {

bool lists(const std::string& controllers, const std::string& name) {
  std::istringstream words(controllers);
  for (std::string word; std::getline(words, word, ',');)
    if (word == name) return true;
  return false;
}

}  // namespace

std::vector<std::filesystem::path> control_group_directories(const std::filesystem::path& root,
                                                             const std::string& controller) {
  const std::filesystem::path mount = root / "sys/fs/cgroup";
  std::ifstream lines(root / "proc/self/cgroup");
  std::vector<std::filesystem::path> directories;
  // "0::/path" is version 2; "5:cpu,cpuacct:/path" is a tree of version 1.
  for (std::string line; std::getline(lines, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == line.npos || second == line.npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && !lists(controllers, controller)) continue;
    const std::filesystem::path tree = controllers.empty() ? mount : mount / controller;
    std::filesystem::path group = std::filesystem::path(line.substr(second + 1)).relative_path();
    for (; !group.empty(); group = group.parent_path()) directories.push_back(tree / group);
    directories.push_back(tree);
  }
  return directories;
}

std::string first_word(const std::filesystem::path& file) {
  std::ifstream stream(file);
  std::string word;
  stream >> word;
  return word;
}

std::optional<std::int64_t> number_in(const std::filesystem::path& file) {
  const std::string word = first_word(file);
  std::int64_t value = 0;
  const auto result = std::from_chars(word.data(), word.data() + word.size(), value);
  if (word.empty() || result.ec != std::errc() || result.ptr != word.data() + word.size()) return std::nullopt;
  return value;
}

}  // namespace espalier
