#include "espalier/program/running_order.h"

#include "espalier/program/schedule.h"

namespace espalier {
std::vector<RunEntry> running_order(std::span<const PlanItem> items, std::size_t most) {
  std::vector<RunEntry> entries;
  int level = 0;
  run_schedule(items, [&](Event event, const PlanItem& item) {
    if (event == Event::close) --level;
    const double forward = item.seconds / (item.state.recomputes_attention() ? 4 : 3);
    const double seconds = event == Event::wave   ? item.seconds
                           : event == Event::open ? forward
                                                  : item.seconds - forward;
    if (entries.size() < most) entries.push_back({static_cast<char>(event), &item, level, seconds});
    if (event == Event::open) ++level;
  });
  return entries;
}

}  // namespace espalier
