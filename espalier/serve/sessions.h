// Sessions: one for each client that connects. A session ends when the client says so, or after an hour without a word.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "espalier/base/json.h"

namespace espalier::serve {

inline constexpr double kSilentSeconds = 3600;

struct Session {
  std::string id;
  double created = 0, last_heard = 0;  // seconds since 1970
  Json finished;                       // null while it lives, else the reason
  Json user_metadata, tags;
  std::string sdk_version, project;
};

class Sessions {
 public:
  Session& add(const std::string& id, double now);
  Session* find(const std::string& id);
  const std::map<std::string, Session>& all() const { return sessions_; }

 private:
  std::map<std::string, Session> sessions_;
};

// Twelve hex digits that nobody can guess.
std::string random_name(const char* prefix);
double seconds_since_1970();
// "2026-11-28T09:30:00.123456+00:00".
std::string time_text(double seconds);

}  // namespace espalier::serve
