#include "espalier/replay/replay.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "espalier/base/error.h"
#include "espalier/checkpoint/model_directory.h"
#include "espalier/config/model_config.h"
#include "espalier/data/training_data.h"
#include "espalier/device/host_values.h"
#include "espalier/measure/machine.h"
#include "espalier/options/products.h"
#include "espalier/parallel/agreement.h"
#include "espalier/shape/trained_parameters.h"
#include "espalier/state/planning.h"
#include "espalier/state/trained_choice.h"
#include "espalier/train/trace.h"

namespace espalier {
namespace {

// The recorded options with what may differ between a run and its replay taken from the command line.
Options replay_options(const Trace& trace, const Options& given) {
  Options options = trace.options;
  options.threads = given.threads, options.device = given.device;
  options.schedule = given.schedule, options.share = given.share, options.trunk_state = given.trunk_state;
  options.wave_state = given.wave_state, options.path_state = given.path_state, options.spill_dir = given.spill_dir;
  trace.start(options);
  options.token_budget = given.token_budget, options.memory_budget = given.memory_budget;
  if (given.dtype != Options().dtype) options.dtype = given.dtype;
  if (given.products != ProductsOf::automatic) options.products = given.products;
  return options;
}

at::Tensor recorded_weights(const std::filesystem::path& file, const ParameterTable& table) {
  at::Tensor flat = at::zeros({table.kept_size()}, at::kDouble);
  load_named_tensors(file, table, DType::float64, host_bytes(flat));
  return flat;
}

// Compares the weights of all ranks, each of which has a part of them; padding is 0 on both sides.
CheckpointDifference compare(std::int64_t step, const ModelState& model, const at::Tensor& ours,
                             const at::Tensor& theirs, const at::Tensor& initial) {
  double largest = 0, absolute = 0, squares = 0, moved = 0;
  const auto compare_run = [&](std::int64_t begin, std::int64_t count, bool counted) {
    if (!counted) return;
    const at::Tensor recorded = theirs.narrow(0, begin, count), difference = ours.narrow(0, begin, count) - recorded;
    largest = std::max(largest, difference.abs().max().item<double>());
    absolute += difference.abs().sum().item<double>();
    squares += difference.square().sum().item<double>();
    moved += (recorded - initial.narrow(0, begin, count)).square().sum().item<double>();
  };
  for_each_run(
      model.table, [](const Parameter& parameter) { return parameter.shard.counted; }, compare_run);
  const std::vector<double> sums = sums_over_ranks(model.mesh.world, {absolute, squares, moved});
  const auto weights = static_cast<double>(LocalShape(model.shape).parameters(Parameters::trained));
  CheckpointDifference out;
  out.step = step;
  out.max_abs = maxima_over_ranks(model.mesh.world, {largest}).front();
  out.mean_abs = sums[0] / weights;
  out.rms = std::sqrt(sums[1] / weights);
  out.movement_rel_l2 = std::sqrt(sums[1]) / std::sqrt(sums[2]);
  return out;
}

}  // namespace

ReplayReport replay(const std::filesystem::path& directory, const Options& given, Progress& progress,
                    const std::function<void(const CheckpointDifference&)>& on_checkpoint, const Mesh& mesh) {
  const Trace trace = read_trace(directory);
  const Options options = replay_options(trace, given);
  choose_products(options);
  const ModelShape shape = read_trained_shape(trace.model, trained_choice(options));
  const TrainingData data(read_for_model(trace.rollouts.string(), shape, progress, {.kept_sets = options.kept_sets}),
                          options);
  require_same(mesh.world, trace.rollouts.string(), data.fingerprint(), "give every rank the same files");
  const auto steps = static_cast<std::int64_t>(trace.steps.size());
  if (data.mini_batches() != steps)
    throw InputError({trace.rollouts.string(), text_of("records of ", steps, " steps, as in trace.json"),
                      text_of("records of ", data.mini_batches(), " steps"), "every record of a trace has its `step`"});
  const MachineProfile machine = machine_profile(options, progress, mesh);
  const std::vector<HeldModel> held{{local_shape(shape, mesh), {}}};
  StepsFit fit;
  for (std::int64_t i = 0; i < steps; ++i) fit.add(held, options, machine, data.mini_batch(i).rollouts, false, mesh);
  fit.require();
  const auto model = load_model(trace.model, options.dtype, progress, mesh, trained_choice(options));
  model->decoder.reserve_positions(std::max<std::int64_t>(data.longest(), trace.positions));
  Device& device = model->decoder.device();
  AdamW optimizer(model->table, model->weights, AdamWSettings::from(options), device, {.world = mesh.world});
  optimizer.set_last_step(steps);
  Actor actor(*model, options, machine, &optimizer);
  const at::Tensor initial = device.to_host(optimizer.masters()).to(at::kDouble, false, true);

  ReplayReport report;
  auto checkpoint = trace.checkpoints.begin();
  progress.begin("replaying", steps, "steps");
  for (std::int64_t i = 0; i < steps; ++i) {
    const StepReport step = run_step(actor, data.mini_batch(i), false);
    const Trace::Step& recorded = trace.steps[static_cast<std::size_t>(i)];
    report.steps.push_back(
        {recorded.step, step.gradient.loss.loss, step.update.grad_norm, recorded.loss, recorded.grad_norm});
    for (; checkpoint != trace.checkpoints.end() && checkpoint->step <= recorded.step; ++checkpoint) {
      const at::Tensor theirs = recorded_weights(checkpoint->file, model->table);
      report.checkpoints.push_back(
          compare(checkpoint->step, *model, device.to_host(optimizer.masters()).to(at::kDouble), theirs, initial));
      on_checkpoint(report.checkpoints.back());
    }
    progress.advance_to(i + 1);
  }
  progress.end();
  return report;
}

}  // namespace espalier
