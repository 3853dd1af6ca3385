#include "espalier/model/chosen_experts.h"

#include <algorithm>

#include "espalier/base/error.h"

namespace espalier::moe {
namespace {

bool known(const std::uint16_t* experts) { return *experts != RecordedExperts::kFree; }

}  // namespace

ChosenExperts::ChosenExperts(const ModelShape& shape, std::span<const Rollout> rollouts)
    : layers_(shape.expert_layers()), chosen_(shape.experts_per_token) {
  for (const Rollout& rollout : rollouts)
    ids_.emplace_back(static_cast<std::size_t>(rollout.length() * width()), RecordedExperts::kFree);
}

void ChosenExperts::write(std::span<const RowSegment> segments, std::int64_t place, const std::int32_t* choice_RK,
                          const std::vector<std::int32_t>* rows) {
  std::vector<std::uint16_t*> record;  // of every row of the set
  for (const RowSegment& segment : segments)
    for (std::int32_t depth = segment.begin; depth < segment.end; ++depth)
      record.push_back(at(segment.rollout, depth) + place * chosen_);
  for (std::size_t r = 0; r < (rows ? rows->size() : record.size()); ++r, choice_RK += chosen_) {
    std::uint16_t* of_row = record[rows ? static_cast<std::size_t>((*rows)[r]) : r];
    std::copy(choice_RK, choice_RK + chosen_, of_row);
    std::sort(of_row, of_row + chosen_);
  }
}

std::int64_t ChosenExperts::unite(std::span<const PrefixTree> trees) {
  std::int64_t changed = 0;
  // One layer of a shared token.
  const auto unite_at = [&](std::span<const std::int32_t> rollouts, std::int32_t depth, std::int64_t offset) {
    const auto first = std::ranges::find_if(rollouts, [&](std::int32_t r) { return known(at(r, depth) + offset); });
    if (first == rollouts.end()) return;
    const std::uint16_t* from = at(*first, depth) + offset;
    for (const std::int32_t rollout : rollouts) {
      std::uint16_t* to = at(rollout, depth) + offset;
      if (known(to) && !std::equal(from, from + chosen_, to)) ++changed;
      std::copy(from, from + chosen_, to);
    }
  };
  for (const PrefixTree& tree : trees)
    for (const PrefixNode& node : tree.nodes) {
      if (node.multiplicity() < 2) continue;
      std::vector<std::int32_t> rollouts(tree.leaf_order.begin() + node.leaf_begin,
                                         tree.leaf_order.begin() + node.leaf_end);
      std::ranges::sort(rollouts);
      for (std::int32_t depth = node.begin; depth < node.end; ++depth)
        for (std::int64_t offset = 0; offset < width(); offset += chosen_) unite_at(rollouts, depth, offset);
    }
  return changed;
}

std::vector<std::int64_t> ChosenExperts::numbers() const {
  std::vector<std::int64_t> out;
  for (const auto& of_rollout : ids_)
    for (const std::uint16_t id : of_rollout) out.push_back(id == RecordedExperts::kFree ? 0 : id + 1);
  return out;
}

void ChosenExperts::take(std::span<const std::int64_t> numbers) {
  auto next = numbers.begin();
  for (auto& of_rollout : ids_)
    for (std::uint16_t& id : of_rollout) {
      const std::int64_t number = *next++;
      id = number == 0 ? RecordedExperts::kFree : static_cast<std::uint16_t>(number - 1);
    }
}

ChosenExperts ChosenExperts::reversed() const {
  ChosenExperts out = *this;
  std::ranges::reverse(out.ids_);
  return out;
}

ChoiceDifference ChosenExperts::difference(const ChosenExperts& other, std::span<const Rollout> recorded) const {
  ESPALIER_INTERNAL(other.ids_.size() == ids_.size() && other.width() == width());
  ChoiceDifference out;
  for (std::size_t i = 0; i < ids_.size(); ++i)
    for (std::size_t place = 0; place < ids_[i].size(); place += static_cast<std::size_t>(chosen_)) {
      const std::uint16_t *mine = ids_[i].data() + place, *theirs = other.ids_[i].data() + place;
      const auto depth = static_cast<std::int32_t>(static_cast<std::int64_t>(place) / width());
      if (!known(mine) || !known(theirs) || (!recorded.empty() && !recorded[i].experts_at(depth).empty())) continue;
      ++out.choices;
      if (!std::equal(mine, mine + chosen_, theirs)) ++out.differing;
    }
  return out;
}

}  // namespace espalier::moe
