// Which state every trunk and every wave of a draft takes: the least predicted time that fits.
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

  // Sets the states of the items, which follow each other, and of everything below them. `room`: bytes above what is
  // held throughout. Where nothing fits: the states that need least. Each wave takes the cheapest state that fits
  // beside the open trunks; trunks of one item take the cheapest state for all that fits, then each a cheaper one that
  // still does.
  void choose(std::vector<Draft>& items, std::int64_t room) const;

 private:
  struct Found {
    double seconds;
    std::int64_t peak, stored;
  };

  void choose_item(Draft& item, std::int64_t room, std::int64_t in_flight) const;
  void refine(Draft& item, std::int64_t room, std::int64_t in_flight, Found best) const;
  // Sets the states of the waves below, `held` bytes being open above them.
  void choose_waves(Draft& item, std::int64_t held, std::int64_t room) const;
  // With states of waves chosen for those of its trunks.
  Found weigh(Draft& item, std::int64_t room, std::int64_t in_flight) const;

  const CostModel& model_;
  const ActivationBytes& bytes_;
  std::int64_t spill_room_;
  std::vector<ItemState> trunks_, waves_;
};

// "; path ...": which of its layers are offloaded, or divided; empty where none is.
std::string path_text(const PathPlan& path);

// ", trunks kept, waves recomputed": what the items' states are; empty where all are kept.
std::string states_text(const std::vector<Draft>& items);

}  // namespace espalier
