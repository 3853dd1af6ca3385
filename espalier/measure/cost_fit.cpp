#include "espalier/measure/cost_fit.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "espalier/base/error.h"
#include "espalier/measure/machine.h"

namespace espalier {
namespace {

constexpr double kLeastSeconds = 0.2, kUneven = 0.1, kFarthest = 2, kBusy = 2.0 / 3;
constexpr double kNoticeable = 0.02;  // of a step: below that a part's ratio is noise
constexpr double CostParts::*kParts[] = {&CostParts::products, &CostParts::attention, &CostParts::rows,
                                         &CostParts::head};

CostParts sum_of(const std::vector<PlanItem>& items, const CostModel& model) {
  CostParts sum;
  for (const PlanItem& item : items) {
    sum += model.parts(work_of(item), item.state);
    sum += sum_of(item.below, model);
  }
  return sum;
}

double quantile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  const std::ptrdiff_t at = std::lround(share * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), values.begin() + at, values.end());
  return values[static_cast<std::size_t>(at)];
}

}  // namespace

CostParts predicted_parts(const StepPlan& plan, const CostModel& model) { return sum_of(plan.items, model); }

CostParts measured_parts(const StepProfile& profile) {
  CostParts out;
  for (const auto& [name, seconds] : profile.seconds) {
    if (name == part::kPlan || name == part::kOptimizer) continue;
    if (name == part::kProducts)
      out.products += seconds;
    else if (name == part::kAttention)
      out.attention += seconds;
    else if (name == part::kHead)
      out.head += seconds;
    else
      out.rows += seconds;
  }
  return out;
}

void CostFit::add(const CostParts& measured, const CostParts& predicted, double product_flops_per_second) {
  if (predicted.total() < kLeastSeconds) return;
  CostParts ratio;
  for (const auto part : kParts)
    ratio.*part = predicted.*part < kNoticeable * predicted.total() ? std::numeric_limits<double>::quiet_NaN()
                                                                    : measured.*part / predicted.*part;
  ratios_.push_back(ratio);
  total_ratios_.push_back(measured.total() / predicted.total());
  product_rates_.push_back(product_flops_per_second);
}

CostParts CostFit::factors(const MachineProfile& machine) const {
  CostParts out{1, 1, 1, 1};
  const double expected = machine.matrix_flops_per_second(kProductRows);
  for (const auto part : kParts) {
    std::vector<double> values;
    for (std::size_t step = 0; step < ratios_.size(); ++step)
      if (!std::isnan(ratios_[step].*part)) values.push_back(ratios_[step].*part * product_rates_[step] / expected);
    if (static_cast<std::int64_t>(values.size()) >= CostFit::kLeastSteps) out.*part = quantile(values, 0.5);
  }
  return out;
}

std::string CostFit::why_not(const MachineProfile& machine) const {
  if (steps() < kLeastSteps)
    return text_of(steps(), " steps of ", kLeastSeconds, " s or more, ", kLeastSteps, " are needed");
  const double expected = machine.matrix_flops_per_second(kProductRows), rate = quantile(product_rates_, 0.5);
  if (rate < kBusy * expected)
    return text_of("the machine was busy: matrix products at ", std::llround(rate / 1e9), " GFLOP/s, ",
                   std::llround(expected / 1e9), " in its profile");
  std::vector<double> totals;
  for (std::size_t step = 0; step < ratios_.size(); ++step)
    totals.push_back(total_ratios_[step] * product_rates_[step] / expected);
  const double low = quantile(totals, 0.25), middle = quantile(totals, 0.5), high = quantile(totals, 0.75);
  if (high - low > kUneven * middle)
    return text_of("the machine was not quiet: half of the steps took ", low, " to ", high,
                   " times what was predicted");
  const CostParts fit = factors(machine);
  for (const auto part : kParts)
    if (!(fit.*part <= kFarthest && fit.*part >= 1 / kFarthest))
      return text_of("some of the steps took ", fit.*part, " times what was predicted");
  return "";
}

}  // namespace espalier
