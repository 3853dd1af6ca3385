// Samplers: snapshots of weights that clients draw from, and which of their samples have ended.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "espalier/serve/http.h"

namespace espalier::serve {

// A sampler's requests are numbered by its clients; a clone in another process counts from a number of its own.
inline constexpr std::int64_t kNumbersOfAClone = 1'000'000'000;

struct Completion {
  std::int64_t cursor = 0;
  std::string future;
  bool failed = false;
  std::int64_t bytes = 0;
};

// The ended requests of one client of a sampler, and the polls that wait for the next one.
struct CompletionLine {
  struct Waiter {
    std::int64_t after;  // the cursor behind which it waits
    Respond respond;
    std::shared_ptr<void> timer;
  };
  std::vector<Completion> completions;  // that the client has not confirmed, the oldest first
  std::int64_t last = 0;                // cursor of the newest that there was
  std::map<std::int64_t, Waiter> waiters;
};

struct Sampler {
  std::string id, session, base;
  std::string model_path;  // of the checkpoint; empty: the base model, or a snapshot without a name
  double created = 0, last_used = 0;
  std::int64_t clones = 0, live = 0;             // live: requests that have not ended
  std::map<std::int64_t, std::string> seen;      // futures by the request's number
  std::map<std::int64_t, CompletionLine> lines;  // by clone

  // Cursors go on from the time, so that a restarted server's are beyond the former one's.
  CompletionLine& line(std::int64_t clone);
};

class Samplers {
 public:
  Sampler& add(const std::string& id, const std::string& session, const std::string& base, double now);
  Sampler* find(const std::string& id);
  void remove(const std::string& id) { samplers_.erase(id); }
  const std::map<std::string, Sampler>& all() const { return samplers_; }

 private:
  std::map<std::string, Sampler> samplers_;
};

}  // namespace espalier::serve
