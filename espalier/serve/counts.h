// Numbers about a server since its start, for /metrics and the page.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <string>

namespace espalier::serve {

// The kinds of work on the engine's thread whose time is counted.
enum class WorkKind { gradient, step, saving, other, samples };
inline constexpr std::array<const char*, 5> kWorkKinds{"gradient", "step", "saving", "other", "samples"};

// The engine's thread adds, the server's thread reads.
struct EngineCounts {
  std::atomic<std::int64_t> rows_computed = 0, rows_shared = 0, gradients = 0, steps = 0, states_saved = 0;
  std::atomic<std::int64_t> samples = 0, sampled_tokens = 0, prompt_tokens = 0, cached_tokens = 0;
  std::array<std::atomic<std::int64_t>, kWorkKinds.size()> microseconds{};
};

struct AnswerCounts {
  std::map<int, std::int64_t> by_status;
  std::int64_t failed_futures = 0, bytes_in = 0;
};

// The last calls of one model, for its curve.
struct RunHistory {
  struct Call {
    std::int64_t number = 0;
    double loss = 0;
  };
  static constexpr std::size_t kMost = 512, kMostEnded = 16;  // calls; models that have ended

  std::deque<Call> calls;
  std::int64_t steps = 0, rows_computed = 0, rows_shared = 0;
};

}  // namespace espalier::serve
