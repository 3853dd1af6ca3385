#include "espalier/plan/running_order.h"

namespace espalier {
namespace {

void add_entries(const PlanItem& item, int level, std::size_t most, std::vector<RunEntry>& entries) {
  if (entries.size() >= most) return;
  if (item.kind == ItemKind::wave) {
    entries.push_back({'B', &item, level, item.seconds});
    return;
  }
  const double forward = item.seconds / (item.state.recomputes_attention() ? 4 : 3);
  entries.push_back({'A', &item, level, forward});
  for (const PlanItem& below : item.below) add_entries(below, level + 1, most, entries);
  if (entries.size() < most) entries.push_back({'C', &item, level, item.seconds - forward});
}

}  // namespace

std::vector<RunEntry> running_order(std::span<const PlanItem> items, std::size_t most) {
  std::vector<RunEntry> entries;
  for (const PlanItem& item : items) add_entries(item, 0, most, entries);
  return entries;
}

}  // namespace espalier
