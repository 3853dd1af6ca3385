#include "espalier/serve/sessions.h"

#include <sys/random.h>

#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <ctime>

#include "espalier/base/error.h"

namespace espalier::serve {

Session& Sessions::add(const std::string& id, double now) {
  Session& session = sessions_[id];
  session.id = id;
  session.created = session.last_heard = now;
  return session;
}

Session* Sessions::find(const std::string& id) {
  const auto found = sessions_.find(id);
  return found == sessions_.end() ? nullptr : &found->second;
}

std::string random_name(const char* prefix) {
  std::array<unsigned char, 6> bytes{};
  ESPALIER_INTERNAL(getrandom(bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()), "no random bytes");
  std::string out = prefix;
  for (const unsigned char byte : bytes) {
    char text[3];
    std::snprintf(text, sizeof text, "%02x", byte);
    out += text;
  }
  return out;
}

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string time_text(double seconds) {
  const double whole = std::floor(seconds);
  const auto time = static_cast<std::time_t>(whole);
  std::tm parts{};
  gmtime_r(&time, &parts);
  char text[64];
  const std::size_t size = std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &parts);
  std::snprintf(text + size, sizeof text - size, ".%06d+00:00", static_cast<int>((seconds - whole) * 1e6));
  return text;
}

}  // namespace espalier::serve
