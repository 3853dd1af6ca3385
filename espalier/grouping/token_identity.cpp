#include "espalier/grouping/token_identity.h"

#include <algorithm>
#include <unordered_map>

#include "espalier/rollout/token_hash.h"

namespace espalier {
namespace {

// Gives equal (id, record) pairs equal numbers below 0; ids without a record keep their own, which are not.
class Numbering {
 public:
  explicit Numbering(std::span<const Rollout> rollouts) : rollouts_(rollouts) {}

  std::int32_t number(std::int32_t rollout, std::int32_t depth) {
    const Rollout& here = rollouts_[static_cast<std::size_t>(rollout)];
    const auto experts = here.experts_at(depth);
    const std::int32_t id = here.token_at(depth);
    if (experts.empty()) return id;
    words_.assign(experts.begin(), experts.end());
    words_.push_back(id);
    const auto [begin, end] = known_.equal_range(hash_of_tokens(words_));
    for (auto entry = begin; entry != end; ++entry) {
      const Rollout& other = rollouts_[static_cast<std::size_t>(entry->second.rollout)];
      if (other.token_at(entry->second.depth) == id &&
          std::ranges::equal(other.experts_at(entry->second.depth), experts))
        return entry->second.number;
    }
    const auto fresh = -1 - static_cast<std::int32_t>(known_.size());
    known_.emplace(hash_of_tokens(words_), Known{rollout, depth, fresh});
    return fresh;
  }

 private:
  struct Known {
    std::int32_t rollout, depth, number;
  };
  std::span<const Rollout> rollouts_;
  std::unordered_multimap<std::uint64_t, Known> known_;
  std::vector<std::int32_t> words_;
};

}  // namespace

TokenIdentity::TokenIdentity(std::span<const Rollout> rollouts) : rollouts_(rollouts) {
  if (std::none_of(rollouts.begin(), rollouts.end(),
                   [](const Rollout& rollout) { return rollout.recorded_experts.tokens > 0; }))
    return;
  Numbering numbering(rollouts);
  for (std::int32_t i = 0; i < static_cast<std::int32_t>(rollouts.size()); ++i) {
    std::vector<std::int32_t>& numbers = numbers_.emplace_back();
    for (std::int32_t depth = 0; depth < rollouts[static_cast<std::size_t>(i)].length(); ++depth)
      numbers.push_back(numbering.number(i, depth));
  }
}

std::span<const std::int32_t> TokenIdentity::run_at(std::int32_t rollout, std::int32_t depth) const {
  const auto i = static_cast<std::size_t>(rollout);
  if (!numbers_.empty()) return std::span(numbers_[i]).subspan(static_cast<std::size_t>(depth));
  const Rollout& of = rollouts_[i];
  const std::int32_t prompt = of.prompt_length();
  if (depth < prompt) return std::span(of.prompt_ids).subspan(static_cast<std::size_t>(depth));
  return std::span(of.response_ids).subspan(static_cast<std::size_t>(depth - prompt));
}

bool same_prompt(const Rollout& a, const Rollout& b) {
  if (a.prompt_ids != b.prompt_ids) return false;
  for (std::int32_t depth = 0;
       depth < std::max(a.recorded_experts.tokens, b.recorded_experts.tokens) && depth < a.prompt_length(); ++depth)
    if (!std::ranges::equal(a.experts_at(depth), b.experts_at(depth))) return false;
  return true;
}

}  // namespace espalier
