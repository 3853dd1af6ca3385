#include "espalier/program/joint_order.h"

#include <algorithm>
#include <cctype>

#include "espalier/base/error.h"
#include "espalier/program/row_shares.h"

namespace espalier {
namespace {

constexpr char kDealtWave = 'b';

Event event_of(char letter) { return static_cast<Event>(std::toupper(letter)); }

}  // namespace

std::string events_of(const std::vector<PlanItem>& items, std::int64_t cp_rank) {
  std::string events;
  run_schedule(items, [&](Event event, const PlanItem& item) {
    if (!runs_on(item, cp_rank)) return;
    events += event == Event::wave && item.cp_rank != PlanItem::kEveryRank ? kDealtWave : static_cast<char>(event);
  });
  return events;
}

std::vector<JointEvent> joint_order(std::vector<std::string> events, std::int64_t cp, std::int64_t first) {
  for (std::string& of_rank : events) std::ranges::reverse(of_rank);  // the next one is the last
  const std::size_t ranks = events.size();
  const auto dp_of = [&](std::size_t rank) { return (first + static_cast<std::int64_t>(rank)) / cp; };
  const auto may_run = [&](std::size_t rank) {
    if (events[rank].empty()) return false;
    if (events[rank].back() == kDealtWave) return true;
    const auto differs = [&](std::size_t other) {
      return events[other].empty() || events[other].back() != events[rank].back();
    };
    for (std::size_t other = rank; other-- > 0 && dp_of(other) == dp_of(rank);)
      if (differs(other)) return false;
    for (std::size_t other = rank + 1; other < ranks && dp_of(other) == dp_of(rank); ++other)
      if (differs(other)) return false;
    return true;
  };
  std::vector<JointEvent> order;
  for (;;) {
    std::size_t longest = ranks;
    for (std::size_t rank = 0; rank < ranks; ++rank)
      if (may_run(rank) && (longest == ranks || events[rank].size() > events[longest].size())) longest = rank;
    if (longest == ranks) break;
    JointEvent next{event_of(events[longest].back()), std::vector<std::uint8_t>(ranks)};
    for (std::size_t rank = 0; rank < ranks; ++rank)
      next.own[rank] = may_run(rank) && event_of(events[rank].back()) == next.event;
    for (std::size_t rank = 0; rank < ranks; ++rank)
      if (next.own[rank]) events[rank].pop_back();
    order.push_back(std::move(next));
  }
  ESPALIER_INTERNAL(std::ranges::all_of(events, &std::string::empty), "ranks of cp with other trunks than each other");
  return order;
}

RankRange joint_ranks(const Degrees& d, const Place& place, bool path_sharded) {
  const std::int64_t all = d.dp * d.cp, of_experts = std::max<std::int64_t>(1, d.ep / d.tp);
  const std::int64_t of_rows = path_sharded || (d.pp > 1 && of_experts > 1) ? d.cp : 1;
  const std::int64_t larger = std::max(of_experts, of_rows);
  const std::int64_t together = d.full || larger % std::min(of_experts, of_rows) != 0 ? all : larger;
  return {(place.dp * d.cp + place.cp) / together * together, together};
}

}  // namespace espalier
