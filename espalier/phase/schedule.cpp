#include "espalier/phase/schedule.h"

namespace espalier {

void run_schedule(const std::vector<PlanItem>& items, Executor& executor) {
  for (const PlanItem& item : items) {
    if (item.kind == ItemKind::wave) {
      executor.run_wave(item);
      continue;
    }
    executor.open_trunk(item);
    run_schedule(item.below, executor);
    executor.close_trunk(item);
  }
}

}  // namespace espalier
