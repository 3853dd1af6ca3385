// Fits the cost model to measured steps: measured over predicted seconds, by part.
//
// Only `bench` fits: it writes the factors into the machine's cached profile, from which every plan reads them, so that
// the same command gives the same plan until the next `bench`.
#pragma once

#include <string>
#include <vector>

#include "espalier/forecast/cost_model.h"
#include "espalier/measure/step_profile.h"
#include "espalier/program/step_plan.h"

namespace espalier {

// Predicted parts of a whole plan: the sum over its items.
CostParts predicted_parts(const StepPlan& plan, const CostModel& model);
// Measured parts of a step's profile; unclaimed time counts to the rows, planning and the optimizer to nothing.
CostParts measured_parts(const StepProfile& profile);

class CostFit {
 public:
  static constexpr std::int64_t kLeastSteps = 24;

  // A step that ran; `predicted` by a profile without a fit; the rate of a large matrix product at about that time.
  void add(const CostParts& measured, const CostParts& predicted, double product_flops_per_second);

  // Medians over the steps of measured / predicted, corrected for the rate of a product measured beside each step,
  // because other load on the machine slows both alike. 1 for a part that is negligible in the steps.
  CostParts factors(const MachineProfile& machine) const;
  // The reason to reject the factors as not typical of the machine: fewer than kLeastSteps steps of at least 0.2 s,
  // products at less than two thirds of the profile's rate, ratios that differ by more than a tenth between the
  // quarters, or factors outside 1/2 ... 2. "": they may be kept.
  std::string why_not(const MachineProfile& machine) const;
  std::int64_t steps() const { return static_cast<std::int64_t>(ratios_.size()); }

 private:
  std::vector<CostParts> ratios_;
  std::vector<double> total_ratios_, product_rates_;  // measured / predicted of the whole step; FLOP/s about then
};

}  // namespace espalier
