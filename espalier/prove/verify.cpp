#include "espalier/prove/verify.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/dot.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <string_view>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/checkpoint/model_directory.h"
#include "espalier/config/model_config.h"
#include "espalier/data/training_data.h"
#include "espalier/device/scalar_type.h"
#include "espalier/grouping/prefix_tree.h"
#include "espalier/measure/machine.h"
#include "espalier/parallel/agreement.h"
#include "espalier/prove/verified_step.h"
#include "espalier/score/score.h"
#include "espalier/shape/trained_parameters.h"
#include "espalier/state/planning.h"
#include "espalier/state/trained_choice.h"
#include "espalier/step/over_ranks.h"
#include "espalier/train/pair_training.h"

namespace espalier {
namespace {

constexpr double kFloat64Relative = 1e-10;  // required of every gradient in float64
constexpr double kFloorMultiple = 2;
constexpr int kMoreDraws = 6;
constexpr double kDeviations = 3;  // of a sum of independent errors: passed by chance once in 400 sums

// Dense, in waves that hold every rollout whole: rows cut over waves would read a path, and what is wrong there would
// raise the floors that it is judged by. `whole`: rows of the longest rollout, 0 where such a wave does not fit.
Options dense_of(Options options, std::int64_t whole) {
  options.schedule = "dense";
  if (options.token_budget > 0) options.token_budget = std::max(options.token_budget, whole);
  return options;
}

StepOutcome run_reversed(VerifiedStep& step, const MiniBatch& mini_batch, Options options, std::int64_t whole) {
  moe::ChoiceRecord& choices = step.learner().choices;
  const moe::ChosenExperts* const given = choices.given;
  std::optional<moe::ChosenExperts> reversed;
  if (given) choices.given = &reversed.emplace(given->reversed());
  const std::vector<Rollout> rollouts(mini_batch.rollouts.rbegin(), mini_batch.rollouts.rend());
  const TokenSeries advantages(mini_batch.advantages.rbegin(), mini_batch.advantages.rend());
  const TokenSeries targets(mini_batch.targets.rbegin(), mini_batch.targets.rend());
  options.token_budget = whole;  // other waves than in dense_of
  StepOutcome out = step.run({rollouts, advantages, targets}, options);
  choices.given = given;
  for (TokenSeries& series : out.series) std::ranges::reverse(series);
  return out;
}

// Turns the last bit of every step-th trained weight over: a move by one unit in the last place, as rounding makes it,
// towards either side. Twice leaves the weights as they were.
void turn_last_bits(const ModelState& model, std::int64_t step = 1) {
  Device& device = model.decoder.device();
  const at::Tensor now = device.to_host(model.weights), room = device.host_room(model.weights);
  if (!room.is_same(now)) room.copy_(now);
  room.view(model.dtype == DType::bfloat16 ? at::kShort : at::kInt).slice(0, 0, std::nullopt, step).bitwise_xor_(1);
  device.to_device(room, model.weights);
}

double sum_of_squares(const at::Tensor& x) { return at::dot(x, x).item<double>(); }

double largest_difference(const TokenSeries& a, const TokenSeries& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    for (std::size_t t = 0; t < a[i].size(); ++t) {
      const double difference = std::abs(a[i][t] - b[i][t]);
      if (!(difference <= largest)) largest = std::isnan(difference) ? HUGE_VAL : difference;
    }
  return largest;
}

// Marks the tokens whose numbers do not have the same bits.
void mark_other_bits(const TokenSeries& a, const TokenSeries& b, std::vector<std::vector<bool>>& marked) {
  marked.resize(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    marked[i].resize(a[i].size());
    for (std::size_t t = 0; t < a[i].size(); ++t)
      if (std::bit_cast<std::uint64_t>(a[i][t]) != std::bit_cast<std::uint64_t>(b[i][t])) marked[i][t] = true;
  }
}

// The loss is one sum over tokens, whose errors cancel more in one run than in the next: the difference of two dense
// runs is a single draw and may be near zero. Its floor is the deviation of such a sum: kDeviations times
// sqrt(sum over tokens of (dL/dlogprob * difference of the log-probs)^2 + the same of the entropies); of a critic, of
// the values.
double loss_floor(const std::vector<TokenSeries>& slopes, const StepOutcome& dense, const StepOutcome& other) {
  double variance = 0;
  for (std::size_t s = 0; s < slopes.size(); ++s)
    for (std::size_t i = 0; i < slopes[s].size(); ++i)
      for (std::size_t t = 0; t < slopes[s][i].size(); ++t)
        if (slopes[s][i][t] != 0)
          variance += std::pow(slopes[s][i][t] * (other.series[s][i][t] - dense.series[s][i][t]), 2);
  return kDeviations * std::sqrt(variance);
}

// The gradient of a value head's bias is one such sum, of the slopes dL/dvalue, added in float32 in the plan's order:
// each addition rounds a partial sum, which is as large as the sum or as the root of the slopes' squares.
double bias_floor(const std::vector<TokenSeries>& slopes, const std::vector<TokenSeries>& others) {
  constexpr double kRounding = 0x1p-24;
  double sum = 0, squares = 0, variance = 0, count = 0;
  for (std::size_t i = 0; i < slopes[0].size(); ++i)
    for (std::size_t t = 0; t < slopes[0][i].size(); ++t) {
      const double slope = slopes[0][i][t];
      sum += slope, squares += slope * slope, count += 1;
      variance += std::pow(slope - others[0][i][t], 2);
    }
  return kDeviations * std::sqrt(variance + count * std::pow(kRounding, 2) * std::max(sum * sum, squares));
}

struct Variant {
  std::string name;
  Options options;
};

std::vector<Variant> variants_of(const Options& options, std::int32_t longest) {
  std::vector<Variant> out;
  auto add = [&](Schedule schedule, std::int64_t budget, SavedState state) {
    Options variant = options;
    variant.schedule = schedule, variant.token_budget = budget, variant.trunk_state = state;
    std::string name = name_of(schedule);
    if (budget > 0) name += text_of(", ", budget, " rows a wave");
    if (schedule == Schedule::phased) name += text_of(", ", name_of(state));
    out.push_back({std::move(name), std::move(variant)});
  };
  if (options.schedule != Schedule::automatic) {
    add(options.schedule, options.token_budget, options.trunk_state);
    return out;
  }
  std::vector<std::int64_t> budgets{options.token_budget};
  if (options.token_budget == 0) budgets.push_back(std::max(2, longest / 3));
  for (const std::int64_t budget : budgets) {
    add(Schedule::packed, budget, options.trunk_state);
    for (const SavedState state : {SavedState::keep, SavedState::recompute, SavedState::offload})
      if (options.trunk_state == state ||
          (options.trunk_state == SavedState::automatic && state != SavedState::offload))
        add(Schedule::phased, budget, state);
  }
  add(Schedule::automatic, options.token_budget, options.trunk_state);
  return out;
}

// A B of 0 would hide the gradient of A.
TrainedChoice checked_choice(const Options& options) {
  TrainedChoice choice = trained_choice(options);
  choice.added.draws_all = true;
  return choice;
}
std::optional<CriticChoice> checked_critic(const Options& options) {
  std::optional<CriticChoice> critic = trained_critic(options);
  if (critic) critic->train.added.draws_all = true;
  return critic;
}

// Dense and every variant, before any weight is read. Further runs in float64 are not held to the budget.
// Returns the rows of a dense wave that holds every rollout whole, or 0 where it does not fit.
std::int64_t require_runs_fit(const ModelShape& shape, const Options& options, const MachineProfile& machine,
                              const TrainingData& data, const Mesh& mesh) {
  const HeldState state{.optimizer = false};
  std::vector<HeldModel> held{{local_shape(shape, mesh), state}};
  if (const auto critic = checked_critic(options))
    held.push_back({local_shape(read_critic_shape(*critic), mesh), state});
  const auto add = [&](StepsFit& fit, const Options& run) {
    fit.add(held, run, machine, data.mini_batch(0).rollouts, true, mesh);
  };
  std::int64_t whole = data.longest();
  Options dense = options;
  dense.token_budget = whole;
  StepsFit whole_fits;
  add(whole_fits, dense_of(dense, whole));
  if (maxima_over_ranks(mesh.world, {whole_fits.fits() ? 0.0 : 1.0}).front() > 0) whole = 0;
  StepsFit fit;
  for (const Variant& run : variants_of(options, data.longest())) add(fit, run.options);
  add(fit, dense_of(options, whole));
  fit.require();
  return whole;
}

class Verification {
 public:
  Verification(VerifiedStep& step, const MiniBatch& mini_batch, const Options& options, std::int64_t whole)
      : step_(step),
        model_(step.learner().model),
        whole_(model_.shape, Parameters::trained),
        mini_batch_(mini_batch),
        options_(dense_of(options, whole)),
        whole_rows_(whole) {
    dense_ = step.run(mini_batch, options_);
    slopes_ = step.slopes(mini_batch, options_, dense_);
    dense_squares_ =
        over_parameters([&](const Parameter& here) { return sum_of_squares(kept(dense_.gradient, here)); });
    // In float64, so that the 1e-16 of the whole that rounding leaves of a vanishing gradient are within what is
    // allowed.
    smallest_norm_ = gradient_norm() * (model_.dtype == DType::float64 ? 1e-5 : 1e-8);
    loss_dense = loss_shared = dense_.loss;
    for (const Parameter& parameter : whole_.parameters()) parameters.push_back({parameter.name, {}, 1});
    raise_floors(run_reversed(step, mini_batch, options_, whole));
    if (model_.dtype == DType::float64) return;
    // The two runs' rows often have the same bits, and a gradient of few numbers differs little by chance.
    turn_last_bits(model_);
    raise_floors(step.run(mini_batch, options_));
    turn_last_bits(model_);
  }

  // Takes another dense run of the same step into the floors.
  void raise_floors(const StepOutcome& other) {
    const std::vector<double> distances = relative_distances(other.gradient);
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      double floor = distances[p];
      if (parameters[p].name == kValueBias)
        floor = std::max(floor, bias_floor(slopes_, step_.slopes(mini_batch_, options_, other)) / size_of(p));
      raise(parameters[p].distance, floor, kFloat64Relative);
    }
    raise(series, largest_difference(other.series[0], dense_.series[0]), kFloat64Relative);
    raise(loss, std::max(std::abs(other.loss - dense_.loss), loss_floor(slopes_, dense_, other)),
          kFloat64Relative * std::max(1.0, std::abs(dense_.loss)));
    raise(optimizer, largest_move_difference(other.gradient), 0);
  }

  // Experts of one layer differ by the tokens that chose them; the floor of an expert that few tokens chose is a draw
  // of few terms, and low by chance now and then. Each matrix is given at least the root mean square of its kind.
  void pool_expert_floors() {
    std::map<std::string, std::vector<Distance*>> kinds;  // "model.layers.0.mlp.experts." + "down_proj.weight"
    for (ParameterCheck& check : parameters) {
      constexpr std::string_view kExperts = ".experts.";
      const std::size_t end = check.name.find(kExperts);
      if (end == check.name.npos || check.distance.floor == 0) continue;  // 0: no token chose it
      const std::size_t begin = end + kExperts.size();
      kinds[check.name.substr(0, begin) + check.name.substr(check.name.find('.', begin) + 1)].push_back(
          &check.distance);
    }
    for (const auto& [kind, distances] : kinds) {
      double squares = 0;
      for (const Distance* distance : distances) squares += distance->floor * distance->floor;
      const double pooled = std::sqrt(squares / static_cast<double>(distances.size()));
      for (Distance* distance : distances) raise(*distance, pooled, distance->allowed);
    }
  }

  // The floor of a gradient of few numbers is the largest of few draws, and low by chance now and then: where something
  // is beyond it, more dense runs, in either order and with the last bits of other weights, decide.
  void draw_more_where_beyond() {
    if (model_.dtype == DType::float64) return;
    double worst = 0;
    for (const ScheduleCheck& schedule : schedules) worst = std::max(worst, schedule.worst_ratio);
    if (maxima_over_ranks(model_.mesh.world, {worst}).front() <= 1) return;
    for (int draw = 0; draw < kMoreDraws; ++draw) {
      turn_last_bits(model_, draw + 2);
      raise_floors(draw % 2 == 0 ? run_reversed(step_, mini_batch_, options_, whole_rows_)
                                 : step_.run(mini_batch_, options_));
      turn_last_bits(model_, draw + 2);
    }
    pool_expert_floors();
    for (std::size_t s = 0; s < schedules.size(); ++s) judge(schedules[s], errors_[s]);
  }

  void check(const Variant& variant) {
    Options options = options_;
    options.schedule = variant.options.schedule, options.token_budget = variant.options.token_budget;
    options.trunk_state = variant.options.trunk_state;
    const StepOutcome shared = step_.run(mini_batch_, options);
    ScheduleCheck schedule{variant.name, shared.plan.physical_rows(), shared.plan.trunks, shared.plan.waves, 0};
    std::vector<double> errors = relative_distances(shared.gradient);
    const std::vector<double> squares =
        over_parameters([&](const Parameter& here) { return sum_of_squares(kept(shared.gradient, here)); });
    const std::vector<double> products = over_parameters([&](const Parameter& here) {
      return at::dot(kept(shared.gradient, here), kept(dense_.gradient, here)).item<double>();
    });
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      const double norms = std::sqrt(squares[p] * dense_squares_[p]);
      if (norms > 0) parameters[p].cosine = std::min(parameters[p].cosine, products[p] / norms);
    }
    mark_other_bits(shared.series[0], dense_.series[0], other_bits_);
    const double loss_error = std::abs(shared.loss - dense_.loss);
    if (!(loss_error <= loss.error)) loss_shared = shared.loss;
    errors.push_back(largest_difference(shared.series[0], dense_.series[0]));
    errors.push_back(loss_error);
    judge(schedule, errors);
    errors_.push_back(std::move(errors));
    optimizer.error = std::max(optimizer.error, largest_move_difference(shared.gradient));
    schedules.push_back(std::move(schedule));
  }

  std::int64_t logical_rows() const { return dense_.plan.logical_rows; }
  double gradient_norm() const { return std::sqrt(std::accumulate(dense_squares_.begin(), dense_squares_.end(), 0.0)); }

  // The verdict so far; meanings as in Verdict. `series`: log-probs, or values.
  std::vector<ParameterCheck> parameters;
  std::vector<ScheduleCheck> schedules;
  Distance series, loss, optimizer;
  double loss_dense = 0, loss_shared = 0;
  std::optional<moe::ChoiceDifference> router;

  // Tokens whose number has other bits than that of the dense run in some schedule.
  std::int64_t other_bits() const {
    std::int64_t count = 0;
    for (const std::vector<bool>& rollout : other_bits_) count += std::ranges::count(rollout, true);
    return count;
  }

 private:
  void raise(Distance& distance, double floor, double float64_allowed) const {
    distance.floor = std::max(distance.floor, floor);
    distance.allowed = model_.dtype == DType::float64 ? float64_allowed : kFloorMultiple * distance.floor;
  }

  // `errors` of a schedule: of every parameter, of the series and of the loss.
  void judge(ScheduleCheck& schedule, const std::vector<double>& errors) {
    schedule.worst_ratio = 0;
    const auto take = [&](Distance& distance, double error) {
      if (std::isnan(error)) error = HUGE_VAL;
      distance.error = std::max(distance.error, error);
      schedule.worst_ratio = std::max(schedule.worst_ratio, Distance{error, distance.floor, distance.allowed}.ratio());
    };
    for (std::size_t p = 0; p < parameters.size(); ++p) take(parameters[p].distance, errors[p]);
    take(series, errors[parameters.size()]);
    take(loss, errors[parameters.size() + 1]);
  }

  // The part of a parameter that this rank keeps.
  at::Tensor kept(const at::Tensor& flat, const Parameter& here) const {
    const Kept kept = model_.table.kept(here);
    return flat.narrow(0, kept.place, kept.count);
  }

  // For every parameter of the whole model the sum over its elements, of which ranks have parts.
  std::vector<double> over_parameters(const std::function<double(const Parameter& here)>& sum_here) const {
    std::vector<double> sums;
    for (const Parameter& parameter : whole_.parameters()) {
      const Parameter* const here = model_.table.find(parameter.name);
      sums.push_back(here != nullptr && here->shard.counted ? sum_here(*here) : 0);
    }
    return sums_over_ranks(model_.mesh.world, std::move(sums));
  }

  // The distance of every parameter's gradient, relative to the dense one's norm; where that vanishes, to what rounding
  // makes of the whole gradient.
  std::vector<double> relative_distances(const at::Tensor& gradient) const {
    std::vector<double> distances = over_parameters(
        [&](const Parameter& here) { return sum_of_squares(kept(gradient, here) - kept(dense_.gradient, here)); });
    for (std::size_t p = 0; p < distances.size(); ++p)
      if (distances[p] != 0) distances[p] = std::sqrt(distances[p]) / size_of(p);  // both may vanish
    return distances;
  }
  double size_of(std::size_t p) const { return std::max(std::sqrt(dense_squares_[p]), smallest_norm_); }

  // Largest difference of a weight between one AdamW step with this gradient and one with the dense gradient.
  double largest_move_difference(const at::Tensor& gradient) const {
    const at::Tensor difference = weights_after(gradient) - weights_after(dense_.gradient);
    return maxima_over_ranks(model_.mesh.world, {difference.abs().max().item<double>()}).front();
  }
  at::Tensor weights_after(const at::Tensor& gradient) const {
    Device& device = model_.decoder.device();
    const at::ScalarType accumulator = step_.learner().gradients.flat().scalar_type();
    const at::Tensor weights = device.adopt(device.to_host(model_.weights).to(accumulator, false, true));
    AdamWSettings settings = AdamWSettings::from(options_);
    settings.warmup_steps = 0;
    settings.schedule = LrSchedule::constant;
    AdamW(model_.table, weights, settings, device, {.world = model_.mesh.world})
        .step(device.adopt(gradient.to(accumulator)));
    return device.to_host(weights).to(at::kDouble);
  }

  VerifiedStep& step_;
  const ModelState& model_;
  ParameterTable whole_;
  MiniBatch mini_batch_;
  Options options_;
  std::int64_t whole_rows_;
  StepOutcome dense_;
  std::vector<double> dense_squares_;  // of every parameter
  std::vector<TokenSeries> slopes_;
  std::vector<std::vector<bool>> other_bits_;
  std::vector<std::vector<double>> errors_;  // of every schedule
  double smallest_norm_ = 0;
};

struct ChoosingRun {
  StepOutcome outcome;
  std::optional<moe::ChosenExperts> choices;  // of a model with experts
};

// Runs the step and writes down the choices that its routers make.
ChoosingRun run_choosing(VerifiedStep& step, const MiniBatch& mini_batch, const Options& options) {
  moe::ChosenExperts chosen(step.learner().model.shape, mini_batch.rollouts);
  step.learner().choices = {.written = &chosen};
  StepOutcome outcome = step.run(mini_batch, options);
  step.learner().choices = {};
  const Mesh& mesh = step.learner().model.mesh;
  gather_choices(mesh.replicas, chosen);
  gather_choices(mesh.pp, chosen);  // each stage has its own layers'
  return {std::move(outcome), std::move(chosen)};
}

// A token that rollouts share chooses the same in all of them, so that their prefix does not end there. Dense rows of
// it may differ by rounding, and at a tie within that in their choice: then the outcome is that of the united choices.
ChoosingRun exact_run(VerifiedStep& step, const MiniBatch& mini_batch, const Options& options) {
  if (step.learner().model.shape.experts == 0) return {step.run(mini_batch, options), {}};
  ChoosingRun run = run_choosing(step, mini_batch, options);
  if (run.choices->unite(build_prefix_trees(mini_batch.rollouts, ShareMode::whole_trees)) > 0) {
    step.learner().choices = {.given = &*run.choices};
    run.outcome = step.run(mini_batch, options);
    step.learner().choices = {};
  }
  return run;
}

std::unique_ptr<VerifiedStep> step_of(Actor& actor) {
  if (actor.model.shape.value_head) return std::make_unique<RewardStep>(actor);
  return std::make_unique<ActorStep>(actor);
}

// The same step in float64, dense: the actor's, or the critic's.
ChoosingRun float64_run(const Options& options, const MiniBatch& mini_batch, std::int32_t longest, bool critic,
                        const Mesh& mesh) {
  const bool reward = options.objective == ObjectiveKind::reward;
  Options exact = dense_of(options, longest);
  exact.dtype = "float64";
  NoProgress silent;  // a run of the task that is shown
  const MachineProfile machine = default_profile(options.device, DType::float64, at::get_num_threads());
  if (critic && !reward) {
    Workspace workspace(budget_of(exact).beside_held());
    const CriticChoice choice = *checked_critic(options);
    Critic value_model(load_value_model(choice.source, DType::float64, static_cast<std::uint64_t>(options.seed), silent,
                                        mesh, choice.train),
                       exact, machine, workspace);
    value_model.model().decoder.reserve_positions(longest);
    CriticStep step(value_model);
    return exact_run(step, mini_batch, exact);
  }
  const auto model = load_model(options.model, DType::float64, silent, mesh, checked_choice(options));
  model->decoder.reserve_positions(longest);
  Actor actor(*model, exact, machine);
  const std::unique_ptr<VerifiedStep> step = step_of(actor);
  return exact_run(*step, mini_batch, exact);
}

// The difference between the choices of a dense run that chooses freely and the choices in float64.
moe::ChoiceDifference free_difference(VerifiedStep& step, const MiniBatch& mini_batch, Options options,
                                      const moe::ChosenExperts& exact) {
  options.schedule = "dense";
  const ChoosingRun free = run_choosing(step, mini_batch, options);
  if (step.learner().model.shape.value_head) return free.choices->difference(exact, {});  // records are the policy's
  return free.choices->difference(exact, mini_batch.rollouts);
}

// Runs of one step beside its variants: dense in two orders, below float64 also with other last bits and in float64,
// and with experts also freely.
std::int64_t other_runs(const ModelState& model) {
  if (model.dtype == DType::float64) return 2;
  return model.shape.experts > 0 ? 5 : 4;
}

// All runs of a step compared; a run more is reported to `ran` as it ends.
Verification verified(VerifiedStep& step, const MiniBatch& mini_batch, const Options& options, std::int32_t longest,
                      std::int64_t whole, const std::function<void(std::int64_t runs)>& ran) {
  const ModelState& model = step.learner().model;
  std::optional<ChoosingRun> exact;
  std::optional<moe::ChoiceDifference> router;
  if (model.dtype != DType::float64) {
    exact = float64_run(options, mini_batch, longest, model.shape.value_head, model.mesh);
    if (exact->choices) {
      // Ranks that have some of the layers or rows know the choices of those alone.
      if (model.mesh.pp.size() == 1 && model.mesh.cp.size() == 1)
        router = free_difference(step, mini_batch, options, *exact->choices);
      step.learner().choices.given = &*exact->choices;
    }
  }
  Verification verification(step, mini_batch, options, whole);
  verification.router = router;
  if (exact) verification.raise_floors(std::exchange(exact->outcome, {}));
  verification.pool_expert_floors();
  ran(other_runs(model));
  for (const Variant& variant : variants_of(options, longest)) {
    verification.check(variant);
    ran(1);
  }
  verification.draw_more_where_beyond();
  step.learner().choices = {};
  return verification;
}

void add_critic(Verdict& verdict, Verification&& critic) {
  for (ParameterCheck& parameter : critic.parameters) {
    parameter.name = "critic." + parameter.name;
    verdict.parameters.push_back(std::move(parameter));
  }
  for (ScheduleCheck& schedule : critic.schedules) {
    schedule.name = "critic: " + schedule.name;
    verdict.schedules.push_back(std::move(schedule));
  }
  verdict.critic = {critic.series, critic.loss, critic.loss_dense, critic.loss_shared, critic.router};
  verdict.optimizer.error = std::max(verdict.optimizer.error, critic.optimizer.error);
  verdict.optimizer.floor = std::max(verdict.optimizer.floor, critic.optimizer.floor);
}

}  // namespace

bool Verdict::pass() const {
  const bool critic_passes = !critic || (critic->values.ratio() <= 1 && critic->loss.ratio() <= 1);
  return worst().distance.ratio() <= 1 && logprob.ratio() <= 1 && loss.ratio() <= 1 && critic_passes;
}

const ParameterCheck& Verdict::worst() const {
  return *std::ranges::max_element(parameters, {}, [](const ParameterCheck& p) { return p.distance.ratio(); });
}

Verdict verify(const Options& options, Progress& progress, const Mesh& mesh) {
  const bool with_critic = !options.critic.empty();
  const ModelShape shape = read_trained_shape(options.model, checked_choice(options));
  TrainingData data(read_for_model(options.rollouts, shape, progress, record_use_of(options, text_rows_of(options))),
                    options, with_critic);
  const std::int32_t longest = data.longest();
  const MachineProfile machine = machine_profile(options, progress, mesh);
  const std::int64_t whole = require_runs_fit(shape, options, machine, data, mesh);
  const auto model = load_model(options.model, options.dtype, progress, mesh, checked_choice(options));
  model->decoder.reserve_positions(longest);
  Actor actor(*model, options, machine);
  std::optional<Critic> critic;
  if (with_critic) {
    critic.emplace(load_critic(*checked_critic(options), options, model->shape, progress, mesh), options, actor.machine,
                   actor.workspace);
    critic->model().decoder.reserve_positions(longest);
    data.prepare(0, [&](std::span<const Rollout> rollouts) { return critic->values_of(rollouts, progress); });
  }
  MiniBatch mini_batch = data.mini_batch(0);
  std::optional<LinearPairs> linear;
  if (options.objective == ObjectiveKind::dpo) {  // the reference without records is the model as it is
    const LogprobFunction logprobs_of = [&](std::span<const Rollout> rollouts) {
      NoProgress silent;
      TokenSeries series;
      for (RolloutSeries& each :
           score_rollouts(model->decoder, rollouts, options, machine, actor.workspace, silent, nullptr, mesh).series)
        series.push_back(std::move(each.logprob));
      return series;
    };
    PairTraining pairs(options);
    pairs.take_reference(data.rollouts(), logprobs_of);
    linear = pairs.linear(mini_batch, logprobs_of);
    mini_batch.advantages = linear->advantages;
  }
  require_same(mesh.world, split_paths(options.rollouts).front(), data.fingerprint(), "give every rank the same files");

  const auto variants = static_cast<std::int64_t>(variants_of(options, longest).size());
  const std::int64_t runs = variants + other_runs(*model);
  progress.begin("verifying", runs + (critic ? variants + other_runs(critic->model()) : 0), "runs");
  std::int64_t done = 0;
  const std::function<void(std::int64_t)> ran = [&](std::int64_t more) { progress.advance_to(done += more); };
  const std::unique_ptr<VerifiedStep> actor_step = step_of(actor);
  Verdict verdict;
  Verification of_actor = verified(*actor_step, mini_batch, options, longest, whole, ran);
  verdict.rollouts = static_cast<std::int64_t>(mini_batch.rollouts.size());
  verdict.logical_rows = of_actor.logical_rows();
  verdict.gradient_norm = of_actor.gradient_norm();
  verdict.parameters = std::move(of_actor.parameters);
  verdict.schedules = std::move(of_actor.schedules);
  verdict.logprob = of_actor.series, verdict.loss = of_actor.loss, verdict.optimizer = of_actor.optimizer;
  verdict.router = of_actor.router;
  verdict.other_bits = of_actor.other_bits();
  verdict.quantised_kind = model->shape.trained.quantised_form.kind;
  verdict.quantised_matrices = std::ssize(ParameterTable(model->shape, Parameters::quantised).parameters());
  verdict.loss_dense = of_actor.loss_dense, verdict.loss_shared = of_actor.loss_shared;
  if (critic) {
    CriticStep critic_step(*critic);
    const Options critic_options = critic->learner().options;
    add_critic(verdict, verified(critic_step, mini_batch, critic_options, longest, whole, ran));
  }
  progress.end();
  return verdict;
}

}  // namespace espalier
