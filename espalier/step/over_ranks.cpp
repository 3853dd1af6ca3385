#include "espalier/step/over_ranks.h"

#include <array>
#include <functional>
#include <utility>

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
  void sum(Group& group) { give(sums_over_ranks(group, std::move(values_))); }
  void largest(Group& group) { give(maxima_over_ranks(group, std::move(values_))); }

 private:
  void give(std::vector<double> values) {
    values_ = std::move(values);
    for (std::size_t i = 0; i < values_.size(); ++i) back_[i](values_[i]);
  }

  std::vector<double> values_;
  std::vector<std::function<void(double)>> back_;
};

void gather(const Mesh& mesh, std::span<std::vector<double>* const> series) {
  std::vector<double> flat;
  for (const std::vector<double>* one : series) flat.insert(flat.end(), one->begin(), one->end());
  flat = values_of_any(mesh.replicas, std::move(flat));
  flat = values_of_any(mesh.pp, std::move(flat));  // its last stage has them
  auto next = flat.begin();
  for (std::vector<double>* one : series)
    for (double& value : *one) value = *next++;
}

}  // namespace

void add_over_ranks(const Mesh& mesh, LossParts& parts) {
  Fields fields;
  for (double* part : {&parts.loss, &parts.pg_loss, &parts.kl_loss, &parts.entropy, &parts.clip_fraction})
    fields.take(*part);
  for (RuleReport& rule : parts.rules) fields.take(rule.holds), fields.take(rule.mean);
  fields.take(parts.loss_tokens);
  fields.sum(mesh.replicas);
  fields.sum(mesh.pp);  // its last stage has them
}

void add_over_ranks(const Mesh& mesh, ValueLossParts& parts) {
  Fields fields;
  for (double* part : {&parts.loss, &parts.clip_fraction, &parts.values_mean}) fields.take(*part);
  fields.take(parts.loss_tokens);
  fields.sum(mesh.replicas);
  fields.sum(mesh.pp);  // its last stage has them
}

void gather_series(const Mesh& mesh, std::vector<RolloutSeries>& series) {
  std::vector<std::vector<double>*> all;
  for (RolloutSeries& one : series) all.push_back(&one.logprob), all.push_back(&one.entropy);
  gather(mesh, all);
}

void gather_series(const Mesh& mesh, TokenSeries& values) {
  std::vector<std::vector<double>*> all;
  for (std::vector<double>& one : values) all.push_back(&one);
  gather(mesh, all);
}

void gather_choices(Group& ranks, moe::ChosenExperts& choices) {
  if (ranks.size() == 1) return;
  std::vector<std::int64_t> numbers = choices.numbers();
  add_over_ranks(ranks, numbers);
  choices.take(numbers);
}

PassReport joined(const Mesh& mesh, PassReport report) {
  StepPlan& plan = report.plan;
  Fields rows, sums, most;
  for (std::int64_t* count : {&report.trunk_rows, &report.wave_rows}) rows.take(*count);
  for (std::int64_t* count :
       {&report.trunk_forwards, &plan.logical_rows, &plan.trunk_rows, &plan.wave_rows, &plan.trunks, &plan.waves})
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
  const PhaseSeconds& phases = seconds.phases;
  const double elapsed = phases.trunk_forward + phases.waves + phases.trunk_backward;
  const double longest = maxima_over_ranks(mesh.pp, {elapsed}).front();
  const double busy = sums_over_ranks(mesh.pp, {elapsed - phases.waiting}).front();
  report.idle_share = longest > 0 ? 1 - busy / (mesh.pp.size() * longest) : 0;
  rows.sum(mesh.replicas);
  sums.sum(mesh.dp);
  most.largest(mesh.world);
  for (std::size_t schedule = 0; schedule < used.size(); ++schedule)
    if (used[schedule] != 0) report.schedules.push_back(static_cast<Schedule>(schedule));
  return report;
}

}  // namespace espalier
