#include "espalier/prove/bench.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <limits>
#include <span>
#include <sstream>

#include "espalier/base/error.h"
#include "espalier/base/random.h"
#include "espalier/config/model_config.h"
#include "espalier/data/training_data.h"
#include "espalier/measure/cost_fit.h"
#include "espalier/measure/machine.h"
#include "espalier/mixers/attention/shape.h"
#include "espalier/plan/planner.h"
#include "espalier/selftest/operation_rates.h"
#include "espalier/shape/trained_parameters.h"
#include "espalier/state/held_models.h"
#include "espalier/state/planning.h"
#include "espalier/state/trained_choice.h"
#include "espalier/step/step.h"

namespace espalier {
namespace {

// Qwen3 in small: large enough that matrix products dominate, small enough for a laptop.
ModelShape built_in_shape() {
  AttentionShape attention;
  attention.heads = 8, attention.kv_heads = 2, attention.head_dim = 64, attention.qk_norm = true;
  attention.rope.theta = 1e6;
  ModelShape shape;
  shape.architecture = "Qwen3ForCausalLM";
  shape.hidden = 512, shape.vocabulary = 8192, shape.max_positions = 40960, shape.tied_head = true;
  shape.layer = attention_layers(8, attention, 1536);
  return shape;
}

std::unique_ptr<ModelState> bench_model(const Options& options, const ModelShape& shape, Progress& progress,
                                        const Mesh& mesh) {
  const std::filesystem::path path = options.model;
  if (std::filesystem::exists(path / "model.safetensors") ||
      std::filesystem::exists(path / "model.safetensors.index.json"))
    return load_model(path, options.dtype, progress, mesh, trained_choice(options));
  if (!path.empty()) progress.note("no weights beside config.json: random ones");
  return random_model(shape, options.dtype, static_cast<std::uint64_t>(options.seed), mesh);
}

struct Split {
  std::int64_t prefix, suffix;
};

std::vector<Split> parse_splits(const std::string& text) {
  std::vector<Split> out;
  std::string item;
  std::istringstream items(text);
  while (std::getline(items, item, ',')) {
    Split split{};
    char slash = 0, more = 0;
    std::istringstream in(item);
    if (!(in >> split.prefix >> slash >> split.suffix) || slash != '/' || split.prefix < 1 || split.suffix < 1 ||
        in >> more)
      throw OptionError({"--splits", "prompt/response lengths, as 1024/1024,1707/341", "'" + item + "'", ""});
    out.push_back(split);
  }
  if (out.empty()) throw OptionError({"--splits", "prompt/response lengths, as 1024/1024,1707/341", "nothing", ""});
  return out;
}

std::vector<std::int64_t> parse_group_sizes(const std::string& text) {
  std::vector<std::int64_t> out;
  for (const double n : parse_numbers("--n", text)) {
    if (n != std::floor(n)) throw OptionError({"--n", "whole numbers, each at least 1", '"' + text + '"', ""});
    out.push_back(std::llround(n));
  }
  return out;
}

// The norm of the elements of all ranks, each element once.
double norm_of(const ModelState& model, const at::Tensor& flat) {
  double squares = 0;
  const auto add_run = [&](std::int64_t begin, std::int64_t count, bool counted) {
    if (counted) squares += std::pow(flat.narrow(0, begin, count).norm().item<double>(), 2);
  };
  for_each_run(
      model.table, [](const Parameter& parameter) { return parameter.shard.counted; }, add_run);
  return std::sqrt(sums_over_ranks(model.mesh.world, {squares}).front());
}

// |gradient - dense| / |dense|, the numerator alone where dense is zero. A result that is no number counts as infinity.
// The gradient on the host is a copy, or is overwritten by the next step.
double distance(const Actor& actor, const at::Tensor& dense, double norm) {
  const at::Tensor gradient = actor.model.decoder.device().to_host(actor.gradients.flat());
  const double error = norm_of(actor.model, gradient.sub_(dense));
  if (!std::isfinite(error)) return std::numeric_limits<double>::infinity();
  return norm > 0 ? error / norm : error;
}

// A group of n random responses to one random prompt, with advantages that sum to about zero.
std::vector<Rollout> random_group(const Split& split, std::int64_t n, std::int64_t vocabulary, Random random) {
  auto ids = [&](std::int64_t count) {
    std::vector<std::int32_t> out(static_cast<std::size_t>(count));
    for (auto& id : out) id = static_cast<std::int32_t>(random.integer(0, vocabulary - 1));
    return out;
  };
  const std::vector<std::int32_t> prompt = ids(split.prefix);
  std::vector<Rollout> group(static_cast<std::size_t>(n));
  for (Rollout& rollout : group) {
    rollout.prompt_ids = prompt;
    rollout.response_ids = ids(split.suffix);
    rollout.loss_mask.assign(rollout.response_ids.size(), 1);
    rollout.reward = random.normal();
    rollout.where = "bench";
  }
  return group;
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  const std::size_t n = values.size();
  return n == 0 ? 0 : n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

struct Entrant {
  const char* schedule;
  BenchMeasure BenchCell::*measure;
};
constexpr Entrant kEntrants[] = {{"dense", &BenchCell::dense},
                                 {"packed", &BenchCell::packed},
                                 {"phased", &BenchCell::phased},
                                 {"auto", &BenchCell::automatic}};

// All of them, or dense and the schedule that is asked for.
std::vector<Entrant> entrants_of(const Options& options) {
  std::vector<Entrant> out;
  for (const Entrant& entrant : kEntrants)
    if (options.schedule == "auto" || options.schedule == entrant.schedule || entrant.measure == &BenchCell::dense)
      out.push_back(entrant);
  return out;
}

// The work of a cell.
struct Task {
  TrainingData data;
  Split split;
  std::int64_t n;
};

// The tasks of --rollouts, or of --splits and --n: every rank of dp then has a group of its own.
std::vector<Task> tasks_of(const Options& options, const ModelShape& shape, Progress& progress, const Mesh& mesh) {
  std::vector<Task> out;
  const std::vector<Split> splits = parse_splits(options.splits);
  const std::vector<std::int64_t> sizes = parse_group_sizes(options.n);
  if (!options.rollouts.empty()) {
    std::vector<Rollout> rollouts = read_for_model(options.rollouts, shape, progress, record_use_of(options));
    std::vector<double> prompts, responses;
    for (const Rollout& rollout : rollouts) {
      prompts.push_back(rollout.prompt_length());
      responses.push_back(rollout.response_length());
    }
    const auto n = static_cast<std::int64_t>(rollouts.size());
    out.push_back({TrainingData(std::move(rollouts), options),
                   {std::llround(median(prompts)), std::llround(median(responses))},
                   n});
    return out;
  }
  const Random random(static_cast<std::uint64_t>(options.seed));
  for (const Split& split : splits)
    for (const std::int64_t n : sizes) {
      const Random of_cell = random.fork(out.size());
      std::vector<Rollout> rollouts = random_group(split, n, shape.vocabulary, of_cell);
      for (std::int64_t rank = 1; rank < mesh.dp.size(); ++rank)
        std::ranges::move(random_group(split, n, shape.vocabulary, of_cell.fork(static_cast<std::uint64_t>(rank))),
                          std::back_inserter(rollouts));
      out.push_back({TrainingData(std::move(rollouts), options), split, n});
    }
  return out;
}

// On every schedule. Errors: MemoryBudgetError.
void require_fits(const Task& task, std::span<const HeldModel> held, Options options, const MachineProfile& machine,
                  const Mesh& mesh) {
  StepsFit fit;
  for (const Entrant& entrant : entrants_of(options)) {
    options.schedule = entrant.schedule;
    fit.add(held, options, machine, task.data.mini_batch(0).rollouts, false, mesh);
  }
  fit.require();
}

BenchCell measure_cell(Actor& actor, const Options& options, const TrainingData& data, const CostModel& unfitted,
                       CostFit& fit, Progress& progress) {
  constexpr double kTold = 10;  // seconds of a run that a note tells at once, in case that the others do not end
  const std::vector<Entrant> entrants = entrants_of(options);
  const bool all = options.schedule == "auto";
  const MiniBatch mini_batch = data.mini_batch(0);
  BenchCell cell;
  std::vector<double> product_rates;
  Device& device = actor.model.decoder.device();
  // Runs that are not timed: memory is touched for the first time, and on a GPU libraries choose and build their
  // kernels by the shapes of each schedule. The gradient of the last one, dense, is what the others are held to.
  if (!device.in_host_memory())
    for (const Entrant& entrant : entrants) {
      if (entrant.measure == &BenchCell::dense || entrant.measure == &BenchCell::automatic) continue;
      actor.options.schedule = entrant.schedule;
      compute_gradient(actor, mini_batch, false);
    }
  actor.options.schedule = "dense";
  compute_gradient(actor, mini_batch, false);
  const at::Tensor dense = device.to_host(actor.gradients.flat()).clone();
  const double dense_norm = norm_of(actor.model, dense);
  if (!std::isfinite(dense_norm))
    throw InputError({options.model.empty() ? "--rollouts" : options.model, "a finite gradient",
                      text_of("norm ", dense_norm), "check weights, rewards and log-probs for extreme values"});
  std::int64_t runs = 0;
  std::vector<PlanItem> plans[std::size(kEntrants)];
  const auto product_rate = [&] {
    return device.in_host_memory() ? product_flops_per_second(actor.model.dtype)
                                   : product_flops_per_second(device, actor.model.dtype, kProductRows);
  };
  double before = product_rate();
  progress.begin("measuring", options.repetitions * static_cast<std::int64_t>(entrants.size()), "runs");
  for (std::int64_t run = 0; run < options.repetitions; ++run)
    for (const Entrant& entrant : entrants) {
      actor.options.schedule = entrant.schedule;
      GradientReport report = compute_gradient(actor, mini_batch, false);
      const double after = product_rate(), rate = (before + after) / 2;
      before = after;
      product_rates.push_back(rate);
      fit.add(measured_parts(*report.profile), predicted_parts(report.plan, unfitted), rate);
      BenchMeasure& measure = cell.*entrant.measure;
      measure.runs.push_back(report.seconds.total);
      measure.product_flops_per_second.push_back(rate);
      measure.predicted_seconds = report.plan.chosen.seconds;
      measure.predicted_peak_bytes = report.plan.chosen.bytes.peak();
      // The dense gradient, kept on the host for the comparison, is no part of the step.
      measure.peak_bytes =
          report.peak_bytes.peak() - (device.in_host_memory() ? static_cast<std::int64_t>(dense.nbytes()) : 0);
      measure.physical_rows = report.plan.physical_rows();
      measure.flops = report.plan.chosen.flops;
      if (options.profile) measure.profile = report.profile;
      cell.ceiling = report.plan.ceiling;
      if (&entrant == &entrants.back()) cell.chosen = name_of(report.schedules.front());
      measure.gradient_error = std::max(measure.gradient_error, distance(actor, dense, dense_norm));
      plans[&entrant - entrants.data()] = std::move(report.plan.items);
      if (report.seconds.total >= kTold)
        progress.note(text_of(entrant.schedule, ": ", std::lround(100 * report.seconds.total) / 100.0, " s"));
      progress.advance_to(++runs);
    }
  for (const Entrant& entrant : kEntrants) (cell.*entrant.measure).seconds = median((cell.*entrant.measure).runs);
  if (!all) cell.automatic = cell.*entrants.back().measure;
  for (std::size_t i = 0; i + 1 < entrants.size(); ++i)
    if (cell.same_plan.empty() && plans[i] == plans[entrants.size() - 1]) cell.same_plan = entrants[i].schedule;
  cell.product_flops_per_second = median(product_rates);
  cell.fitted_steps = actor.machine.fitted_steps;
  cell.profile_flops_per_second = actor.machine.matrix_flops_per_second(kProductRows);
  return cell;
}

// Keeps the fit of enough steps, or says why not. None of a GPU: its profile is a file that the user names.
void finish(const CostFit& fit, MachineProfile machine, Progress& progress) {
  if (machine.source != "measured" || machine.device != "cpu" || fit.steps() < CostFit::kLeastSteps) return;
  const CostParts factors = fit.factors(machine);
  const std::string found = text_of(fit.steps(), " steps took, of what the unfitted model predicts: products x ",
                                    factors.products, ", attention x ", factors.attention,
                                    ", norms, rotations, activations x ", factors.rows, ", head x ", factors.head);
  const std::string why_not = fit.why_not(machine);
  if (!why_not.empty()) return progress.note(found + "; not kept: " + why_not);
  machine.fit = factors;
  machine.fitted_steps = fit.steps();
  if (keep_profile(machine)) progress.note(found + "; kept for plans on this machine");
}

}  // namespace

std::vector<BenchCell> bench(const Options& options, Progress& progress,
                             const std::function<void(const BenchCell&)>& on_cell, const Mesh& mesh) {
  const ModelShape shape =
      train_only(options.model.empty() ? built_in_shape() : read_model_shape(options.model), trained_choice(options));
  const std::array held{HeldModel{local_shape(shape, mesh), {.optimizer = false}}};
  require_room(held, options);
  const std::vector<Task> tasks = tasks_of(options, shape, progress, mesh);
  const bool alone = mesh.world.size() == 1;
  const MachineProfile machine =
      alone ? current_machine_profile(options, progress) : machine_profile(options, progress, mesh);
  for (const Task& task : tasks) require_fits(task, held, options, machine, mesh);
  const auto model = bench_model(options, shape, progress, mesh);
  Actor actor(*model, options, machine);
  actor.options.profile = true;
  MachineProfile unfitted_machine = actor.machine;
  unfitted_machine.fit = {1, 1, 1, 1};
  CostFit fit;
  std::vector<BenchCell> cells;
  for (const Task& task : tasks) {
    model->decoder.reserve_positions(task.data.longest());
    const CostModel unfitted(model->decoder.local(), unfitted_machine, model->dtype,
                             step_kind_of(options, model->shape, task.data.mini_batch(0).rollouts));
    BenchCell cell = measure_cell(actor, options, task.data, unfitted, fit, progress);
    cell.prefix = task.split.prefix, cell.suffix = task.split.suffix, cell.n = task.n;
    on_cell(cell);
    cells.push_back(std::move(cell));
  }
  if (alone) finish(fit, actor.machine, progress);  // ranks wait for each other: no rates of a machine
  return cells;
}

}  // namespace espalier
