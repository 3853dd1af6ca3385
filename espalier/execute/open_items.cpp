#include "espalier/execute/open_items.h"

#include "espalier/base/error.h"

namespace espalier {

OpenItems::OpenItems(const StepRun& step, std::int64_t waves) : step_(step), waves_(static_cast<std::size_t>(waves)) {
  for (std::int64_t i = 0; waves > 1 && i < waves; ++i)
    regions_.push_back(std::make_unique<Arena>(step.arena.limit(), step.decoder.device()));
}

OpenItems::~OpenItems() {
  waves_.clear();
  while (!open_.empty()) open_.pop_back();  // a deque's own destructor would begin with the outermost
}

ItemRun& OpenItems::open_trunk(const PlanItem& item, std::int64_t reports) {
  trim();
  ItemRun& run = open_.emplace_back(step_, item, step_.arena).run;
  step_.path.push(item.set.rows, reports, run.states());
  return run;
}

void OpenItems::close_trunk() {
  step_.path.pop();
  open_.pop_back();
  trim();
}

ItemRun& OpenItems::begin_wave(const PlanItem& item, std::int32_t region) {
  const auto at = static_cast<std::size_t>(region);
  ESPALIER_INTERNAL(!waves_.at(at), "two waves in flight in one region");
  return waves_[at].emplace(step_, item, regions_.empty() ? step_.arena : *regions_[at]).run;
}

void OpenItems::end_wave(std::int32_t region) {
  waves_.at(static_cast<std::size_t>(region)).reset();
  trim_wave(region);
}

void OpenItems::trim() {
  if (step_.spill != nullptr || step_.path.sleeps()) step_.arena.trim();
}

void OpenItems::trim_wave(std::int32_t region) {
  if (!regions_.empty()) regions_[static_cast<std::size_t>(region)]->trim();
}

}  // namespace espalier
