// Training models and the order of their requests.
//
// Requests of a model are numbered 1, 2, 3, ... and run in that order, whatever order they arrive in: one that comes
// early waits for those before it. A number seen before is the same request again, and its future has a name that
// follows from model and number, so that a restarted server knows it, too.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "espalier/base/json.h"
#include "espalier/serve/calls.h"
#include "espalier/serve/engine_thread.h"

namespace espalier::serve {

// Requests of one model that may wait for an earlier one.
inline constexpr std::size_t kMostEarly = 4096;

struct TrainingRun {
  std::string id, session, base;
  TunedPart part;
  Json user_metadata;
  double created = 0, last_request = 0;
  bool ended = false;     // its session has: checkpoints and this entry are left
  std::int64_t next = 1;  // number of the next request to start
  struct Early {
    std::shared_ptr<Unit> unit;
    std::int64_t bytes;  // of the request
  };
  std::map<std::int64_t, Early> early;  // requests whose turn has not come

  // The future of a request; 0: of the model's creation.
  std::string future(std::int64_t number) const { return id + '#' + std::to_string(number); }
  bool has_seen(std::int64_t number) const { return number < next || early.contains(number); }
  std::int64_t free_number() const { return early.empty() ? next : early.rbegin()->first + 1; }
};

class TrainingRuns {
 public:
  TrainingRun& add(const std::string& id);
  TrainingRun* find(const std::string& id);
  const std::map<std::string, TrainingRun>& all() const { return runs_; }
  void remove(const std::string& id) { runs_.erase(id); }

 private:
  std::map<std::string, TrainingRun> runs_;
};

}  // namespace espalier::serve
