// The items that a rank has begun and not yet ended: open trunks as a stack, and waves in flight by region. An item
// keeps its part of an arena until it ends, a trunk until everything below it has ended.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "espalier/execute/item_run.h"
#include "espalier/execute/step_run.h"

namespace espalier {

class OpenItems {
 public:
  // `waves`: the most waves in flight. If there are several, each region has its own arena; one wave uses the step's.
  // The step must outlive the object.
  OpenItems(const StepRun& step, std::int64_t waves);
  // After an error: ends the waves, then the trunks from the innermost outwards, as the arena's stack requires.
  ~OpenItems();
  OpenItems(const OpenItems&) = delete;
  OpenItems& operator=(const OpenItems&) = delete;

  // Pushes the trunk's rows on the path. `reports`: backwards below that will add to its gradients.
  ItemRun& open_trunk(const PlanItem& item, std::int64_t reports);
  void close_trunk();  // the innermost one; pops its rows
  // The innermost open trunk, or one that is `above` levels further out.
  ItemRun& trunk(std::size_t above = 0) { return open_.at(open_.size() - 1 - above).run; }

  // Errors: InternalError if a wave is in flight in the region.
  ItemRun& begin_wave(const PlanItem& item, std::int32_t region);
  void end_wave(std::int32_t region);
  ItemRun& wave(std::int32_t region) { return waves_.at(static_cast<std::size_t>(region))->run; }

  // If state is offloaded, unused pages of the step's arena go back to the system, because they would count beside
  // offloaded ranges. Unused pages of a wave's own arena go back while it waits for its backward.
  void trim();
  void trim_wave(std::int32_t region);

  const std::vector<std::unique_ptr<Arena>>& regions() const { return regions_; }

 private:
  struct Item {
    Item(const StepRun& step, const PlanItem& item, Arena& arena) : scope(arena), run(step, item, arena) {}

    ArenaScope scope;
    ItemRun run;
  };

  const StepRun& step_;
  std::vector<std::unique_ptr<Arena>> regions_;
  std::deque<Item> open_;                   // innermost last
  std::vector<std::optional<Item>> waves_;  // by region
};

}  // namespace espalier
