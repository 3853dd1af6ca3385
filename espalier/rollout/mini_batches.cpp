#include "espalier/rollout/mini_batches.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <unordered_map>

#include "espalier/base/error.h"
#include "espalier/rollout/token_hash.h"
#include "espalier/rollout/trajectories.h"

namespace espalier {
namespace {

struct GroupKey {
  const Rollout* rollout;
  bool by_step;

  bool operator==(const GroupKey& other) const {
    const Rollout &a = *rollout, &b = *other.rollout;
    if (by_step && a.step != b.step) return false;
    if (a.group != b.group) return false;
    return !a.group.empty() || a.prompt_ids == b.prompt_ids;
  }
};

struct GroupKeyHash {
  std::size_t operator()(const GroupKey& key) const {
    const Rollout& rollout = *key.rollout;
    const std::uint64_t identity =
        rollout.group.empty() ? hash_of_tokens(rollout.prompt_ids) : std::hash<std::string>()(rollout.group);
    const std::uint64_t step = key.by_step ? static_cast<std::uint64_t>(*rollout.step) : 0;
    return identity ^ (step + 1) * 0x9e3779b97f4a7c15u;
  }
};

void check_steps(std::span<const Rollout> rollouts) {
  const Rollout *with = nullptr, *without = nullptr;
  for (const Rollout& rollout : rollouts) (rollout.step ? with : without) = &rollout;
  if (with != nullptr && without != nullptr)
    throw InputError({without->where + ": step", "a step in every record or in none",
                      "none here, but one at " + with->where, "Complete the field or remove it everywhere"});
}

}  // namespace

bool all_have_step(std::span<const Rollout> rollouts) {
  return std::all_of(rollouts.begin(), rollouts.end(), [](const Rollout& rollout) { return rollout.step.has_value(); });
}

std::vector<std::int64_t> group_of(std::span<const Rollout> rollouts) {
  const bool by_step = all_have_step(rollouts);
  const Trajectories trajectories = trajectories_of(rollouts);
  std::unordered_map<GroupKey, std::int64_t, GroupKeyHash> groups;
  std::vector<std::int64_t> out;
  out.reserve(rollouts.size());
  for (const std::int64_t trajectory : trajectories.of) {
    const std::int64_t first = trajectories.turns[static_cast<std::size_t>(trajectory)].front();
    const GroupKey key{&rollouts[static_cast<std::size_t>(first)], by_step};
    out.push_back(groups.try_emplace(key, static_cast<std::int64_t>(groups.size())).first->second);
  }
  return out;
}

std::vector<std::vector<std::int64_t>> groups_of(std::span<const Rollout> rollouts) {
  std::vector<std::vector<std::int64_t>> groups;
  const std::vector<std::int64_t> group = group_of(rollouts);
  for (std::size_t i = 0; i < group.size(); ++i) {
    const auto of = static_cast<std::size_t>(group[i]);
    if (of == groups.size()) groups.emplace_back();
    groups[of].push_back(static_cast<std::int64_t>(i));
  }
  return groups;
}

std::vector<std::vector<std::int64_t>> cut_mini_batches(std::span<const Rollout> rollouts, std::int64_t size) {
  if (size < 0)
    throw OptionError({"--mini-batch-size", "a number of rollouts, or 0 for all", std::to_string(size), ""});
  check_steps(rollouts);
  const auto count = static_cast<std::int64_t>(rollouts.size());
  std::vector<std::vector<std::int64_t>> batches;
  if (count == 0) return batches;
  if (all_have_step(rollouts)) {
    std::map<std::int64_t, std::vector<std::int64_t>> steps;
    for (std::int64_t i = 0; i < count; ++i) steps[*rollouts[static_cast<std::size_t>(i)].step].push_back(i);
    for (auto& [step, members] : steps) batches.push_back(std::move(members));
    return batches;
  }
  for (const std::vector<std::int64_t>& members : groups_of(rollouts)) {
    const bool fits =
        !batches.empty() && (size == 0 || static_cast<std::int64_t>(batches.back().size() + members.size()) <= size);
    if (!fits) batches.emplace_back();
    batches.back().insert(batches.back().end(), members.begin(), members.end());
  }
  for (std::vector<std::int64_t>& batch : batches) std::sort(batch.begin(), batch.end());
  return batches;
}

std::string mini_batch_note(std::span<const Rollout> rollouts, const std::vector<std::vector<std::int64_t>>& batches,
                            std::int64_t size) {
  if (size == 0 || batches.empty()) return "";
  if (all_have_step(rollouts))
    return text_of("--mini-batch-size ", size, " is not used, because every record has a step: ", batches.size(),
                   " in all");
  std::int64_t least = std::numeric_limits<std::int64_t>::max(), most = 0;
  for (std::size_t b = 0; b < std::max<std::size_t>(batches.size() - 1, 1); ++b) {  // the last may be smaller
    least = std::min(least, static_cast<std::int64_t>(batches[b].size()));
    most = std::max(most, static_cast<std::int64_t>(batches[b].size()));
  }
  if (least == size && most == size) return "";
  if (batches.size() == 1 && most < size)
    return text_of("--mini-batch-size ", size, " is more than the ", most, " rollouts, which form one mini-batch");
  return text_of("--mini-batch-size ", size, ": a group is never split, so mini-batches hold ",
                 least == most ? text_of(least) : text_of(least, " to ", most), " rollouts (", batches.size(),
                 " in all)");
}

}  // namespace espalier
