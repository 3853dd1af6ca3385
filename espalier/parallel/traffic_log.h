// The collectives of a step as --profile shows them: when each began and ended, and from when its rank waited for it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace espalier {

// For one rank; seconds of Timer::steady_seconds. For tensors on a GPU these are times of the calls: a stream waits
// there, not the rank.
struct CollectiveEvent {
  std::string_view axis, call;  // "dp", "sum"
  std::string of;               // the name of the data, if the caller gave one
  std::int64_t bytes = 0;       // that this rank gave
  double started = 0, ended = 0;
  double wanted = 0;  // when this rank began to wait for it; equal to `started` unless it was started ahead

  double seconds() const { return ended - started; }
  double hidden() const { return std::max(0.0, std::min(wanted, ended) - started); }  // beside the rank's own work
};

using TrafficLog = std::vector<std::shared_ptr<CollectiveEvent>>;  // in the order they were started

}  // namespace espalier
