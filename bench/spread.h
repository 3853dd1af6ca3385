// Ratios of alternated runs, as the benchmarks print them.
#pragma once

#include <time.h>

#include <algorithm>
#include <cstdio>
#include <vector>

namespace espalier::bench {

inline double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Seconds that the threads of this process ran: other programs take none of them.
inline double processor_now() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

double seconds_of(const auto& body, double (*clock)() = now) {
  const double start = clock();
  body();
  return clock() - start;
}

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// above_i / below_i of every round.
inline std::vector<double> ratios(const std::vector<double>& above, const std::vector<double>& below) {
  std::vector<double> out;
  for (std::size_t i = 0; i < above.size(); ++i) out.push_back(above[i] / below[i]);
  return out;
}

// "name": {"median": ..., "min": ..., "max": ...}
inline void print_spread(const char* name, const std::vector<double>& values) {
  std::printf("\"%s\": {\"median\": %.4g, \"min\": %.4g, \"max\": %.4g}", name, median(values),
              *std::min_element(values.begin(), values.end()), *std::max_element(values.begin(), values.end()));
}

}  // namespace espalier::bench
