#include "espalier/loop/shaping.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace espalier {

double overlong_penalty(std::int64_t response_length, std::int64_t limit, std::int64_t buffer, double factor) {
  if (buffer == 0) return 0;
  const auto above = static_cast<double>(response_length - (limit - buffer));
  return std::min(0.0, -factor * above / static_cast<double>(buffer));
}

std::int64_t count_groups(const std::vector<Rollout>& rollouts) {
  std::int64_t groups = 0;
  for (std::size_t i = 0; i < rollouts.size(); ++i) groups += i == 0 || rollouts[i].group != rollouts[i - 1].group;
  return groups;
}

std::int64_t keep_unequal_groups(std::vector<Rollout> rollouts, std::int64_t most, std::vector<Rollout>& kept) {
  std::int64_t equal = 0, groups = count_groups(kept);
  for (auto begin = rollouts.begin(); begin != rollouts.end();) {
    const auto end = std::find_if(begin, rollouts.end(), [&](const Rollout& r) { return r.group != begin->group; });
    const auto judged = std::find_if(begin, end, [](const Rollout& r) { return r.reward.has_value(); });
    if (std::all_of(judged, end, [&](const Rollout& r) { return !r.reward || r.reward == judged->reward; }))
      ++equal;
    else if (groups++ < most)
      std::move(begin, end, std::back_inserter(kept));
    begin = end;
  }
  return equal;
}

}  // namespace espalier
