#include "espalier/plan/wave_dealing.h"

#include <algorithm>
#include <limits>

namespace espalier {
namespace {

// A divided wave's keys and values travel in every layer, which its predicted seconds leave out: it must save a tenth.
constexpr double kDividedCost = 1.1;

// Divides the first waves of `order` and deals the others; returns the seconds of the slowest rank.
double deal(std::vector<PlanItem>& items, const std::vector<std::size_t>& order, std::size_t divided,
            std::int64_t ranks) {
  std::vector<double> load(static_cast<std::size_t>(ranks));
  double together = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    PlanItem& item = items[order[i]];
    if (i < divided) {
      item.cp_rank = PlanItem::kEveryRank;
      together += item.seconds;
      continue;
    }
    const auto least = std::ranges::min_element(load);
    item.cp_rank = static_cast<std::int32_t>(least - load.begin());
    *least += item.seconds;
  }
  return kDividedCost * together / static_cast<double>(ranks) + *std::ranges::max_element(load);
}

}  // namespace

void deal_waves(std::vector<PlanItem>& items, std::int64_t ranks) {
  if (ranks == 1) return;
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (items[i].kind == ItemKind::wave) order.push_back(i);
    deal_waves(items[i].below, ranks);
  }
  if (order.empty()) return;
  std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) { return items[a].seconds > items[b].seconds; });
  // Where there are more than a few waves for each rank, the lightest even out what the heaviest leave.
  const std::size_t most = std::min(order.size(), static_cast<std::size_t>(2 * ranks));
  std::size_t best = 0;
  double least = std::numeric_limits<double>::infinity();
  for (std::size_t divided = 0; divided <= most; ++divided)
    if (const double seconds = deal(items, order, divided, ranks); seconds < least) best = divided, least = seconds;
  deal(items, order, best, ranks);
  // Stages of pp have several waves in flight: of those that ranks run together, the same ones on each.
  for (auto begin = items.begin(); begin != items.end();) {
    const auto is_trunk = [](const PlanItem& item) { return item.kind == ItemKind::trunk; };
    const auto end = std::find_if(begin, items.end(), is_trunk);
    std::stable_partition(begin, end, [](const PlanItem& item) { return item.cp_rank == PlanItem::kEveryRank; });
    begin = end == items.end() ? end : end + 1;
  }
}

}  // namespace espalier
