#include "espalier/optimizer/adamw.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/device/host_values.h"
#include "espalier/device/scalar_type.h"
#include "espalier/ops/operations.h"

namespace espalier {
namespace {

constexpr std::int64_t kPiece = std::int64_t{1} << 20;  // elements between two calls of step's `between`

}  // namespace

AdamWSettings AdamWSettings::from(const Options& options) {
  const std::vector<double> betas = parse_numbers("betas", options.betas);
  if (betas.size() != 2) throw OptionError({"--betas", "two numbers, as 0.9,0.999", "'" + options.betas + "'", ""});
  return {options.lr,
          betas[0],
          betas[1],
          options.eps,
          options.weight_decay,
          options.decay_matrices_only,
          options.max_grad_norm,
          options.warmup_steps,
          options.lr_scheduler_type,
          options.lr_min_ratio,
          options.lr_total_steps};
}

double clip_factor(double norm, double max_norm) {
  if (max_norm == 0) return 1;
  return std::min(1.0, max_norm / (norm + 1e-6));
}

double learning_rate(const AdamWSettings& settings, std::int64_t step) {
  const std::int64_t warmup = settings.warmup_steps;
  if (step <= warmup) return settings.lr * static_cast<double>(step - 1) / static_cast<double>(warmup);
  if (settings.schedule == LrSchedule::constant) return settings.lr;
  ESPALIER_INTERNAL(settings.total_steps > 0, "a schedule without a last step");
  const auto left = static_cast<double>(std::max<std::int64_t>(1, settings.total_steps - warmup));
  const double x = std::min(1.0, static_cast<double>(step - 1 - warmup) / left);
  const double f = settings.schedule == LrSchedule::linear ? 1 - x : (1 + std::cos(std::numbers::pi * x)) / 2;
  return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * f);
}

OptimizerRanks optimizer_ranks(const Options& options, const Mesh& mesh) {
  return {options.shard == Sharding::optimizer ? mesh.dp : mesh_of_one().dp, mesh.world};
}

AdamW::AdamW(const ParameterTable& table, const at::Tensor& weights, const AdamWSettings& settings, Device& device,
             const OptimizerRanks& ranks)
    : table_(table), settings_(settings), device_(device), ranks_(ranks), weights_(weights) {
  const Operations& ops = device.operations();
  const at::ScalarType accumulator = accumulator_type(weights.scalar_type());
  const std::int64_t count = own().end - own().begin;
  masters_ = weights.narrow(0, own().begin, count);
  if (weights.scalar_type() != accumulator) {
    const at::Tensor rounded = masters_;
    masters_ = device.allocate({count}, accumulator);
    ops.convert(rounded, masters_);
  }
  for (at::Tensor* moment : {&exp_avg_, &exp_avg_sq_}) {
    *moment = device.allocate({count}, accumulator);
    ops.zero(*moment);
  }
}

AdamW::Range AdamW::range_of(std::int64_t elements, int ranks, int rank) {
  const std::int64_t part = (elements + ranks - 1) / ranks;
  return {std::min(elements, part * rank), std::min(elements, part * (rank + 1))};
}

// Neighbours that count here are summed at once.
double AdamW::norm_of(const at::Tensor& gradient) const {
  std::vector<at::Tensor> counted;
  for_each_run(
      table_, [](const Parameter& parameter) { return parameter.shard.counted; },
      [&](std::int64_t begin, std::int64_t count, bool here) {
        if (here) counted.push_back(gradient.narrow(0, begin, count));
      });
  const at::Tensor sum_N = device_.allocate({static_cast<std::int64_t>(counted.size())}, at::kDouble);
  for (std::size_t i = 0; i < counted.size(); ++i)
    device_.operations().sum_of_squares(counted[i], sum_N.narrow(0, static_cast<std::int64_t>(i), 1));
  const at::Tensor on_host = device_.to_host(sum_N);
  const auto sums = host_values<const double>(on_host);
  return std::sqrt(sums_over_ranks(ranks_.world, {std::accumulate(sums.begin(), sums.end(), 0.0)}).front());
}

AdamW::Update AdamW::step(const at::Tensor& gradient, const AdamWSettings& settings,
                          const std::function<void()>& between) {
  Update update;
  update.grad_norm = norm_of(gradient);
  if (!std::isfinite(update.grad_norm))
    throw InputError({text_of("optimizer step ", steps_done_ + 1), "a finite gradient",
                      text_of("norm ", update.grad_norm),
                      "the weights are unchanged; check rewards, log-probs and weights for extreme values"});
  update.clip_factor = clip_factor(update.grad_norm, settings.max_grad_norm);
  update.lr = learning_rate(settings, ++steps_done_);
  AdamWStep step{update.lr,          settings.beta1, settings.beta2, settings.eps, settings.weight_decay,
                 update.clip_factor, steps_done_};
  // Neighbours that decay alike are updated at once: no number depends on another.
  const Range mine = own();
  const auto update_run = [&](std::int64_t first, std::int64_t count, bool decaying) {
    step.weight_decay = decaying ? settings.weight_decay : 0;
    const std::int64_t begin = std::max(first, mine.begin);
    const std::int64_t own_count = std::min(first + count, mine.end) - begin;
    if (own_count <= 0) return;
    const auto whole = [&](const at::Tensor& flat) { return flat.narrow(0, begin, own_count); };
    const auto part = [&](const at::Tensor& flat) { return flat.narrow(0, begin - mine.begin, own_count); };
    device_.operations().adamw(part(masters_), whole(gradient), part(exp_avg_), part(exp_avg_sq_), step,
                               weights_.scalar_type() == at::kBFloat16 ? whole(weights_) : at::Tensor());
  };
  const auto update_pieces = [&](std::int64_t first, std::int64_t count, bool decaying) {
    for (std::int64_t done = 0; done < count; done += kPiece) {
      between();
      update_run(first + done, std::min(kPiece, count - done), decaying);
    }
  };
  const auto alike = [&](const Parameter& parameter) { return decays(parameter, settings); };
  if (between)
    for_each_run(table_, alike, update_pieces);
  else
    for_each_run(table_, alike, update_run);
  share_weights();
  return update;
}

void AdamW::share_weights() {
  for (int rank = 0; rank < ranks_.shares.size(); ++rank) {
    const Range moved = range_of(rank);
    ranks_.shares.broadcast(weights_.narrow(0, moved.begin, moved.end - moved.begin), rank);
  }
}

void AdamW::masters_changed() {
  if (weights_.scalar_type() == at::kBFloat16)
    device_.operations().convert(masters_, weights_.narrow(0, own().begin, own().end - own().begin));
  share_weights();
}

bool AdamW::decays(const Parameter& parameter, const AdamWSettings& settings) {
  return !settings.decay_matrices_only || parameter.shape.size() >= 2;
}

}  // namespace espalier
