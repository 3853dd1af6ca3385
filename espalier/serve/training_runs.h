// Training models and the order of their requests.
//
// Requests of a model are numbered 1, 2, 3, ... and run in that order, whatever order they arrive in: one that comes
// early waits for those before it. A number seen before is the same request again.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "espalier/base/json.h"
#include "espalier/serve/calls.h"

namespace espalier::serve {

// Requests of one model that may wait for an earlier one.
inline constexpr std::size_t kMostEarly = 4096;

struct TrainingRun {
  std::string id, session, base;
  LoraConfig lora;
  Json user_metadata;
  double created = 0, last_request = 0;
  std::int64_t next = 1;                                // number of the next request to run
  std::map<std::int64_t, std::string> seen;             // futures by number; 0: of the model's creation
  std::map<std::int64_t, std::function<void()>> early;  // what to start once its turn comes
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
