// Seconds of the stages of pp, and their waiting time for each other.
#pragma once

#include <cstdint>

namespace espalier {

// A trunk and its waves on one stage. All stages and all waves are alike. Without a trunk a and c are 0; in a
// forward-only pass b and c are 0.
struct StageSeconds {
  double trunk_forward = 0, wave_forward = 0, wave_backward = 0, trunk_backward = 0;  // a, f, b, c
};

// S stages, N waves: T = a + N (f + b) + c + (S - 1) (max(a, f) + max(b, c)). The pipeline fills with the first items
// of the last stage and drains with its last items; in the order of program/program.h the last stage has no gap in
// between.
double seconds_of_stages(const StageSeconds& stage, std::int64_t waves, std::int64_t stages);

// Seconds that stages wait: (S - 1) (max(a, f) + max(b, c)).
double seconds_of_waiting(const StageSeconds& stage, std::int64_t stages);

// The waiting time as a share of T; without a trunk (S - 1) / (N + S - 1).
double idle_share(const StageSeconds& stage, std::int64_t waves, std::int64_t stages);

}  // namespace espalier
