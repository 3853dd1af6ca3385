#include "espalier/train/verify.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>

#include "espalier/base/error.h"
#include "espalier/model/dispatch.h"
#include "espalier/objective/objective.h"
#include "espalier/train/machine.h"
#include "espalier/train/step.h"

namespace espalier {
namespace {

constexpr double kFloat64Relative = 1e-10;  // required of every gradient in float64
constexpr double kFloorMultiple = 2;
constexpr double kDeviations = 3;  // of a sum of independent errors: passed by chance once in 400 sums

// What one run gives, copied out of the actor, in double and in the order of the file.
struct Outcome {
  at::Tensor gradient;                                   // flat
  std::vector<std::vector<double>> logprobs, entropies;  // by position in the mini-batch
  double loss = 0;
  StepPlan plan;
};

Outcome run(Actor& actor, const MiniBatch& batch, const Options& options) {
  actor.options = options;
  GradientReport report = compute_gradient(actor, batch, true);
  Outcome out{actor.gradients.flat().to(at::kDouble, false, true), {}, {}, report.loss.loss, std::move(report.plan)};
  for (RolloutSeries& series : report.series) {
    out.logprobs.push_back(std::move(series.logprob));
    out.entropies.push_back(std::move(series.entropy));
  }
  return out;
}

Outcome run_reversed(Actor& actor, const MiniBatch& batch, Options options) {
  const std::vector<Rollout> rollouts(batch.rollouts.rbegin(), batch.rollouts.rend());
  const std::vector<std::vector<double>> advantages(batch.advantages.rbegin(), batch.advantages.rend());
  options.token_budget = 1;  // a dense wave holds whole rollouts: one each
  Outcome out = run(actor, {rollouts, advantages}, options);
  std::ranges::reverse(out.logprobs);
  std::ranges::reverse(out.entropies);
  return out;
}

at::Tensor slice(const at::Tensor& flat, const Parameter& parameter) {
  return flat.narrow(0, parameter.offset, parameter.count);
}

double length(const at::Tensor& x) { return x.norm().item<double>(); }

// Relative to the dense parameter's norm; where that vanishes, to what rounding makes of the whole gradient.
double relative_distance(const at::Tensor& x, const at::Tensor& dense, double smallest_norm) {
  return length(x - dense) / std::max(length(dense), smallest_norm);
}

double largest_difference(const std::vector<std::vector<double>>& a, const std::vector<std::vector<double>>& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    for (std::size_t t = 0; t < a[i].size(); ++t) {
      const double difference = std::abs(a[i][t] - b[i][t]);
      if (!(difference <= largest)) largest = std::isnan(difference) ? HUGE_VAL : difference;
    }
  return largest;
}

// The loss is one sum over tokens, whose errors cancel more in one run than in the next: the difference of two dense
// runs is a single draw and may be near zero. Its floor is the deviation of such a sum: kDeviations times
// sqrt(sum over tokens of (dL/dlogprob * difference of the log-probs)^2 + the same of the entropies).
double loss_floor(const MiniBatch& batch, const Options& options, const Outcome& dense, const Outcome& other) {
  Objective objective(batch.rollouts, batch.advantages, options);
  double variance = 0;
  for (std::size_t i = 0; i < batch.rollouts.size(); ++i) {
    std::vector<double> by_logprob(dense.logprobs[i].size()), by_entropy(by_logprob.size());
    objective.add_rollout(static_cast<std::int32_t>(i), dense.logprobs[i], dense.entropies[i], by_logprob, by_entropy);
    for (std::size_t t = 0; t < by_logprob.size(); ++t) {
      if (by_logprob[t] != 0) variance += std::pow(by_logprob[t] * (other.logprobs[i][t] - dense.logprobs[i][t]), 2);
      if (by_entropy[t] != 0) variance += std::pow(by_entropy[t] * (other.entropies[i][t] - dense.entropies[i][t]), 2);
    }
  }
  return kDeviations * std::sqrt(variance);
}

struct Variant {
  std::string name;
  Options options;
};

std::vector<Variant> variants_of(const Options& options, std::int32_t longest) {
  std::vector<Variant> out;
  auto add = [&](const std::string& schedule, std::int64_t budget, const std::string& state) {
    Options variant = options;
    variant.schedule = schedule, variant.token_budget = budget, variant.trunk_state = state;
    std::string name = schedule;
    if (budget > 0) name += text_of(", ", budget, " rows a wave");
    if (schedule == "phased") name += ", " + state;
    out.push_back({std::move(name), std::move(variant)});
  };
  if (options.schedule != "auto") {
    add(options.schedule, options.token_budget, options.trunk_state);
    return out;
  }
  std::vector<std::int64_t> budgets{options.token_budget};
  if (options.token_budget == 0) budgets.push_back(std::max(2, longest / 3));
  for (const std::int64_t budget : budgets) {
    add("packed", budget, options.trunk_state);
    for (const char* state : {"keep", "recompute"})
      if (options.trunk_state == "auto" || options.trunk_state == state) add("phased", budget, state);
  }
  add("auto", options.token_budget, options.trunk_state);
  return out;
}

class Verification {
 public:
  Verification(Actor& actor, const MiniBatch& batch, const Options& options)
      : actor_(actor), batch_(batch), options_(options) {
    options_.schedule = "dense";
    dense_ = run(actor, batch, options_);
    smallest_norm_ = length(dense_.gradient) * (actor.model.dtype == DType::float64 ? 1e-16 : 1e-8);
    verdict_.rollouts = static_cast<std::int64_t>(batch.rollouts.size());
    verdict_.logical_rows = dense_.plan.logical_rows;
    verdict_.loss_dense = verdict_.loss_shared = dense_.loss;
    for (const Parameter& parameter : actor.model.table.parameters())
      verdict_.parameters.push_back({parameter.name, {}, 1});
    raise_floors(run_reversed(actor, batch, options_));
  }

  // Takes a float64 run of the same step into the floors.
  void raise_floors(const Outcome& other) {
    const auto& parameters = actor_.model.table.parameters();
    for (std::size_t p = 0; p < parameters.size(); ++p)
      raise(verdict_.parameters[p].distance,
            relative_distance(slice(other.gradient, parameters[p]), slice(dense_.gradient, parameters[p]),
                              smallest_norm_),
            kFloat64Relative);
    raise(verdict_.logprob, largest_difference(other.logprobs, dense_.logprobs), kFloat64Relative);
    raise(verdict_.loss, std::max(std::abs(other.loss - dense_.loss), loss_floor(batch_, options_, dense_, other)),
          kFloat64Relative * std::max(1.0, std::abs(dense_.loss)));
    raise(verdict_.optimizer, largest_move_difference(other.gradient), 0);
  }

  void check(const Variant& variant) {
    const Outcome shared = run(actor_, batch_, variant.options);
    ScheduleCheck schedule{variant.name, shared.plan.physical_rows(), shared.plan.trunks, shared.plan.waves, 0};
    const auto& parameters = actor_.model.table.parameters();
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      const at::Tensor a = slice(shared.gradient, parameters[p]), b = slice(dense_.gradient, parameters[p]);
      ParameterCheck& check = verdict_.parameters[p];
      take(check.distance, relative_distance(a, b, smallest_norm_), schedule);
      const double product = length(a) * length(b);
      if (product > 0) check.cosine = std::min(check.cosine, at::dot(a, b).item<double>() / product);
    }
    take(verdict_.logprob, largest_difference(shared.logprobs, dense_.logprobs), schedule);
    const double loss_error = std::abs(shared.loss - dense_.loss);
    if (!(loss_error <= verdict_.loss.error)) verdict_.loss_shared = shared.loss;
    take(verdict_.loss, loss_error, schedule);
    verdict_.optimizer.error = std::max(verdict_.optimizer.error, largest_move_difference(shared.gradient));
    verdict_.schedules.push_back(std::move(schedule));
  }

  Verdict& verdict() { return verdict_; }

 private:
  void raise(Distance& distance, double floor, double float64_allowed) const {
    distance.floor = std::max(distance.floor, floor);
    distance.allowed = actor_.model.dtype == DType::float64 ? float64_allowed : kFloorMultiple * distance.floor;
  }

  static void take(Distance& distance, double error, ScheduleCheck& schedule) {
    if (std::isnan(error)) error = HUGE_VAL;
    distance.error = std::max(distance.error, error);
    schedule.worst_ratio = std::max(schedule.worst_ratio, Distance{error, distance.floor, distance.allowed}.ratio());
  }

  // Largest difference of a weight between one AdamW step with this gradient and one with the dense gradient.
  double largest_move_difference(const at::Tensor& gradient) const {
    return (weights_after(gradient) - weights_after(dense_.gradient)).abs().max().item<double>();
  }
  at::Tensor weights_after(const at::Tensor& gradient) const {
    const at::Tensor weights = actor_.gradients.flat().dtype() == at::kDouble
                                   ? actor_.model.weights.to(at::kDouble, false, true)
                                   : actor_.model.weights.to(at::kFloat, false, true);
    AdamWSettings settings = AdamWSettings::from(options_);
    settings.warmup_steps = 0;
    AdamW(actor_.model.table, weights, settings).step(gradient.to(weights.scalar_type()));
    return weights.to(at::kDouble);
  }

  Actor& actor_;
  MiniBatch batch_;
  Options options_;
  Outcome dense_;
  double smallest_norm_ = 0;
  Verdict verdict_;
};

// The same step in float64, dense.
Outcome float64_outcome(const Options& options, const MiniBatch& batch, std::int32_t longest) {
  Options exact = options;
  exact.dtype = "float64", exact.schedule = "dense";
  NoProgress silent;  // a run of the task that is shown
  const auto model = load_model(options.model, DType::float64, silent);
  model->decoder.reserve_positions(longest);
  Actor actor(*model, exact, default_profile(options.device, DType::float64, at::get_num_threads()));
  return run(actor, batch, exact);
}

}  // namespace

bool Verdict::pass() const { return worst().distance.ratio() <= 1 && logprob.ratio() <= 1 && loss.ratio() <= 1; }

const ParameterCheck& Verdict::worst() const {
  return *std::ranges::max_element(parameters, {}, [](const ParameterCheck& p) { return p.distance.ratio(); });
}

Verdict verify(const Options& options, Progress& progress) {
  const auto model = load_model(options.model, parse_dtype(options.dtype), progress);
  const TrainingData data(read_for_model(options.rollouts, model->shape.vocabulary, progress), options);
  model->decoder.reserve_positions(data.longest());
  const MiniBatch batch = data.mini_batch(0);
  Actor actor(*model, options, machine_profile(options, progress));
  const std::vector<Variant> variants = variants_of(options, data.longest());

  const bool exact = model->dtype == DType::float64;
  std::int64_t runs = exact ? 2 : 3;  // dense in two orders, and in float64
  progress.begin("verifying", runs + static_cast<std::int64_t>(variants.size()), "runs");
  Verification verification(actor, batch, options);
  progress.advance_to(2);
  if (!exact) verification.raise_floors(float64_outcome(options, batch, data.longest()));
  progress.advance_to(runs);
  for (const Variant& variant : variants) {
    verification.check(variant);
    progress.advance_to(++runs);
  }
  progress.end();
  return std::move(verification.verdict());
}

}  // namespace espalier
