// Runs of rows that pass a state on, as launches of kernels: runs that do not follow each other are one launch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "espalier/ops/cuda/delta_rule.h"
#include "espalier/ops/delta_rule.h"
#include "espalier/ops/dispatch.h"

namespace espalier::cuda {

inline const void* place_of(const at::Tensor& state) { return state.defined() ? state.data_ptr() : nullptr; }

// A run is behind one that leaves the state it begins with, and one whose state it writes over.
inline bool follows(const StateRun& run, const StateRun& before) {
  const void *const start = place_of(run.start_N), *const end = place_of(run.end_N);
  const void *const their_start = place_of(before.start_N), *const their_end = place_of(before.end_N);
  return (start != nullptr && start == their_end) || (end != nullptr && (end == their_end || end == their_start));
}

// Runs of a launch each, in an order in which each launch follows those before it.
inline std::vector<std::vector<const StateRun*>> launches_of(std::span<const StateRun> runs) {
  std::vector<std::size_t> level(runs.size(), 0);
  std::vector<std::vector<const StateRun*>> levels;
  for (std::size_t r = 0; r < runs.size(); ++r) {
    for (std::size_t before = 0; before < r; ++before)
      if (level[before] >= level[r] && follows(runs[r], runs[before])) level[r] = level[before] + 1;
    if (levels.size() <= level[r]) levels.resize(level[r] + 1);
    levels[level[r]].push_back(&runs[r]);
  }
  std::vector<std::vector<const StateRun*>> launches;
  for (const std::vector<const StateRun*>& all : levels)
    for (std::size_t first = 0; first < all.size(); first += kRunsAtOnce) {
      const std::size_t end = std::min(all.size(), first + static_cast<std::size_t>(kRunsAtOnce));
      launches.emplace_back(all.begin() + static_cast<std::ptrdiff_t>(first),
                            all.begin() + static_cast<std::ptrdiff_t>(end));
    }
  return launches;
}

template <class A>
DeltaRuns<A> runs_of(const std::vector<const StateRun*>& launch) {
  DeltaRuns<A> runs;
  for (const StateRun* run : launch)
    runs.of[runs.count++] = {run->begin,
                             run->end,
                             pointer<A>(run->start_N),
                             pointer<A>(run->end_N),
                             pointer<A>(run->grad_start_N),
                             pointer<A>(run->grad_end_N)};
  return runs;
}

}  // namespace espalier::cuda
