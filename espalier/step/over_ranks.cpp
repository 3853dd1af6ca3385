#include "espalier/step/over_ranks.h"

#include <array>
#include <functional>

namespace espalier {
namespace {

// Fields that are sums, or maxima, through one collective each.
class Fields {
 public:
  template <class Number>
  void take(Number& field) {
    values_.push_back(static_cast<double>(field));
    back_.push_back([&field](double value) { field = static_cast<Number>(value); });
  }
  void sum(Group& group) { give(sums_over_ranks(group, values_)); }
  void largest(Group& group) { give(maxima_over_ranks(group, values_)); }

 private:
  void give(const std::vector<double>& values) {
    for (std::size_t i = 0; i < values.size(); ++i) back_[i](values[i]);
  }

  std::vector<double> values_;
  std::vector<std::function<void(double)>> back_;
};

// Numbers that one rank has and the others have not: they add 0. A NaN stays one.
void gather(Group& dp, std::span<const std::uint8_t> own, std::span<std::vector<double>* const> series,
            std::size_t per_rollout) {
  if (dp.size() == 1) return;
  std::vector<double> flat;
  for (std::size_t i = 0; i < series.size(); ++i)
    for (const double value : *series[i]) flat.push_back(own[i / per_rollout] ? value : 0);
  flat = sums_over_ranks(dp, std::move(flat));
  auto next = flat.begin();
  for (std::vector<double>* one : series)
    for (double& value : *one) value = *next++;
}

}  // namespace

void add_over_ranks(Group& dp, LossParts& parts) {
  Fields fields;
  for (double* part : {&parts.loss, &parts.pg_loss, &parts.kl_loss, &parts.entropy, &parts.clip_fraction})
    fields.take(*part);
  fields.take(parts.loss_tokens);
  fields.sum(dp);
}

void add_over_ranks(Group& dp, ValueLossParts& parts) {
  Fields fields;
  for (double* part : {&parts.loss, &parts.clip_fraction, &parts.values_mean}) fields.take(*part);
  fields.take(parts.loss_tokens);
  fields.sum(dp);
}

void gather_series(Group& dp, std::span<const std::uint8_t> own, std::vector<RolloutSeries>& series) {
  std::vector<std::vector<double>*> all;
  for (RolloutSeries& one : series) all.push_back(&one.logprob), all.push_back(&one.entropy);
  gather(dp, own, all, 2);
}

void gather_series(Group& dp, std::span<const std::uint8_t> own, TokenSeries& values) {
  std::vector<std::vector<double>*> all;
  for (std::vector<double>& one : values) all.push_back(&one);
  gather(dp, own, all, 1);
}

PassReport joined(Group& dp, PassReport report) {
  StepPlan& plan = report.plan;
  Fields sums, most;
  for (std::int64_t* count : {&report.trunk_rows, &report.wave_rows, &report.trunk_forwards, &plan.logical_rows,
                              &plan.trunk_rows, &plan.wave_rows, &plan.trunks, &plan.waves})
    sums.take(*count);
  for (PlanCost* cost : {&plan.chosen, &plan.dense, &plan.packed, &plan.phased}) {
    sums.take(cost->flops);
    most.take(cost->seconds);
    for (std::int64_t* bytes : {&cost->bytes.a, &cost->bytes.b, &cost->bytes.c}) most.take(*bytes);
  }
  for (PhasePeaks* peaks : {&report.peak_bytes, &report.arena_bytes})
    for (std::int64_t* bytes : {&peaks->a, &peaks->b, &peaks->c}) most.take(*bytes);
  StepSeconds& seconds = report.seconds;
  for (double* part : {&seconds.total, &seconds.plan, &seconds.counting, &seconds.communication,
                       &seconds.phases.trunk_forward, &seconds.phases.waves, &seconds.phases.trunk_backward})
    most.take(*part);
  std::array<double, 4> used{};  // whether any tree ran under each schedule
  for (const TreePlan& tree : plan.trees) used[static_cast<std::size_t>(tree.schedule)] = 1;
  for (double& one : used) most.take(one);
  sums.sum(dp);
  most.largest(dp);
  for (std::size_t schedule = 0; schedule < used.size(); ++schedule)
    if (used[schedule] != 0) report.schedules.push_back(static_cast<Schedule>(schedule));
  return report;
}

}  // namespace espalier
