#include "espalier/measure/profile_cache.h"

#include <cctype>
#include <cstdlib>
#include <memory>

#include "espalier/base/atomic_file.h"
#include "espalier/base/error.h"
#include "espalier/base/json.h"

namespace espalier {
namespace {

// Null where it cannot be written.
std::unique_ptr<AtomicFile> open_cache(const std::filesystem::path& file) {
  std::error_code failed;
  if (file.empty()) return nullptr;
  std::filesystem::create_directories(file.parent_path(), failed);
  try {
    return failed ? nullptr : std::make_unique<AtomicFile>(file);
  } catch (const OptionError&) {
    return nullptr;
  }
}

}  // namespace

std::filesystem::path cache_file(const std::string& name) {
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  const std::filesystem::path folder = cache && *cache ? std::filesystem::path(cache)
                                       : home && *home ? std::filesystem::path(home) / ".cache"
                                                       : std::filesystem::path();
  return folder.empty() ? folder : folder / "espalier" / (name + ".json");
}

bool write_cache(const std::filesystem::path& file, const Json& json) {
  const std::unique_ptr<AtomicFile> out = open_cache(file);
  if (!out) return false;
  out->write(json.dump(1) + "\n");
  out->commit();
  return true;
}

bool can_write_cache(const std::filesystem::path& file) { return open_cache(file) != nullptr; }

std::string file_word(std::string_view name) {
  std::string word;
  for (const char c : name)
    if (std::isalnum(static_cast<unsigned char>(c))) word += c;
  return word;
}

}  // namespace espalier
