#include "espalier/forecast/pipeline_time.h"

#include <algorithm>

namespace espalier {

double seconds_of_waiting(const StageSeconds& s, std::int64_t stages) {
  return static_cast<double>(stages - 1) *
         (std::max(s.trunk_forward, s.wave_forward) + std::max(s.wave_backward, s.trunk_backward));
}

double seconds_of_stages(const StageSeconds& s, std::int64_t waves, std::int64_t stages) {
  return s.trunk_forward + static_cast<double>(waves) * (s.wave_forward + s.wave_backward) + s.trunk_backward +
         seconds_of_waiting(s, stages);
}

double idle_share(const StageSeconds& s, std::int64_t waves, std::int64_t stages) {
  return seconds_of_waiting(s, stages) / seconds_of_stages(s, waves, stages);
}

}  // namespace espalier
