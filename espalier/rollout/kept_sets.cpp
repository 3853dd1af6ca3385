#include "espalier/rollout/kept_sets.h"

#include <algorithm>
#include <cstddef>

#include "espalier/base/error.h"
#include "espalier/rollout/json_text.h"

namespace espalier {

void add_kept_set(KeptSets& sets, std::span<const std::int32_t> ids) {
  if (sets.begin.empty()) sets.begin.push_back(0);
  const std::size_t begin = sets.ids.size();
  sets.ids.insert(sets.ids.end(), ids.begin(), ids.end());
  const auto first = sets.ids.begin() + static_cast<std::ptrdiff_t>(begin);
  if (!std::is_sorted(first, sets.ids.end())) std::sort(first, sets.ids.end());
  sets.ids.erase(std::unique(first, sets.ids.end()), sets.ids.end());
  sets.begin.push_back(static_cast<std::int64_t>(sets.ids.size()));
}

bool keeps(const KeptSets& sets, std::size_t position, std::int32_t id) {
  const auto ids = sets.at(position);
  return ids.empty() || std::ranges::binary_search(ids, id);
}

std::string settle_kept_sets(std::vector<Rollout>& rollouts, KeptSetsUse use) {
  const auto with = std::ranges::count_if(rollouts, [](const Rollout& rollout) { return !rollout.kept_sets.empty(); });
  if (with == 0) return "";
  const std::string count = text_of(with, " of ", rollouts.size(), " records");
  if (use == KeptSetsUse::automatic)
    return text_of("kept_ids in ", count, ": log-probs, entropies and gradients of their tokens are over these sets");
  for (Rollout& rollout : rollouts) rollout.kept_sets = {};
  return text_of("kept_ids in ", count, " are ignored: log-probs are over the whole vocabulary");
}

std::string kept_sets_json(const KeptSets& sets) {
  std::string out = "[";
  for (std::size_t t = 0; t + 1 < sets.begin.size(); ++t) {
    out += t > 0 ? "," : "";
    const auto ids = sets.at(t);
    if (ids.empty()) {
      out += "null";
      continue;
    }
    for (std::size_t i = 0; i < ids.size(); ++i) {
      out += i > 0 ? ',' : '[';
      append_number(out, static_cast<std::int64_t>(ids[i]));
    }
    out += ']';
  }
  return out + "]";
}

}  // namespace espalier
