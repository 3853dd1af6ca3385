// Bounded reading, so that a damaged or hostile file costs neither memory nor stack.
#include "espalier/checkpoint/json_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "espalier/base/atomic_file.h"
#include "espalier/base/error.h"

namespace espalier {
namespace {

constexpr std::int64_t kMaxBytes = std::int64_t{256} << 20;
constexpr int kMaxDepth = 100;

struct Descriptor {
  int number;
  ~Descriptor() {
    if (number >= 0) ::close(number);
  }
};

}  // namespace

std::string read_text_file(const std::filesystem::path& path) {
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  struct stat status;
  if (file.number < 0 || ::fstat(file.number, &status) != 0)
    throw InputError({path.string(), "a readable file", std::strerror(errno), ""});
  if (!S_ISREG(status.st_mode)) throw InputError({path.string(), "a regular file", "another kind of file", ""});
  if (status.st_size > kMaxBytes)
    throw InputError({path.string(), text_of("at most ", kMaxBytes, " bytes"), text_of(status.st_size), ""});
  std::string text(static_cast<std::size_t>(status.st_size), '\0');
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t got = ::read(file.number, text.data() + done, text.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw InputError({path.string(), "a readable file", std::strerror(errno), ""});
    if (got == 0) break;
    done += static_cast<std::size_t>(got);
  }
  text.resize(done);
  return text;
}

Json parse_json_object(const std::string& text, const std::string& where) {
  const auto limit_depth = [&](int depth, Json::parse_event_t, Json&) {
    if (depth > kMaxDepth) throw InputError({where, text_of("at most ", kMaxDepth, " levels"), "deeper JSON", ""});
    return true;
  };
  Json value;
  try {
    value = Json::parse(text, limit_depth);
  } catch (const Json::parse_error& error) {
    throw InputError({where, "JSON", text_of("no valid JSON at byte ", error.byte),
                      "The file is damaged or incomplete; fetch or write it again"});
  }
  if (!value.is_object()) throw InputError({where, "a JSON object", value.type_name(), ""});
  return value;
}

Json read_json_object(const std::filesystem::path& path) {
  return parse_json_object(read_text_file(path), path.string());
}

void write_json_file(const std::filesystem::path& path, const Json& value) {
  OutputFile file(path);
  file.write(value.dump(2));
  file.write("\n");
  file.close_synced();
}

}  // namespace espalier
