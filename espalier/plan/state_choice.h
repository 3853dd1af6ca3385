// Chooses the state of every trunk and wave of a draft: the states that fit memory with the least predicted time.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "espalier/plan/draft.h"
#include "espalier/plan/planner.h"

namespace espalier {

class StateChoice {
 public:
  // The models must outlive the object.
  StateChoice(const CostModel& model, const ActivationBytes& bytes, const PlanOptions& options);

  // The states that --trunk-state and --wave-state allow; the first is used when memory is ample.
  std::span<const ItemState> of_trunks() const { return trunks_; }
  std::span<const ItemState> of_waves() const { return waves_; }
  bool any() const { return trunks_.size() > 1 || waves_.size() > 1; }

  // Sets the states of consecutive items and of everything below them. `room`: the bytes left beside those held
  // throughout. If nothing fits, it sets the states that need the least. Each wave takes the cheapest state that fits
  // beside the open trunks. Trunks of one item first share the cheapest state that fits; then each, or each run of
  // neighbours if there are many, takes a cheaper one if that still fits.
  void choose(std::vector<Draft>& items, std::int64_t room) const;

 private:
  struct Found {
    double seconds;
    std::int64_t peak, stored;
  };

  void choose_item(Draft& item, std::int64_t room, std::int64_t in_flight) const;
  void refine(Draft& item, std::int64_t room, std::int64_t in_flight, Found best) const;
  // Sets the states of the waves below, with `held` bytes open above them.
  void choose_waves(Draft& item, std::int64_t held, std::int64_t room) const;
  // Weighs the item with the waves' states chosen for its trunks' states.
  Found weigh(Draft& item, std::int64_t room, std::int64_t in_flight) const;

  const CostModel& model_;
  const ActivationBytes& bytes_;
  std::int64_t spill_room_;
  std::vector<ItemState> trunks_, waves_;
};

// "; path offloaded but for 2 layers", "; path sharded" or "; path as latents", "; path as latents, offloaded"; empty
// if the path stays in memory.
std::string path_text(const PathPlan& path);

// "; 3 trunks kept; 1 trunks offloaded; waves recomputed": the states of trunks and of waves, each kind left out if all
// of its items are kept.
std::string states_text(const std::vector<Draft>& items);

}  // namespace espalier
