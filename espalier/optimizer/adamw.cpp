#include "espalier/optimizer/adamw.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "espalier/base/error.h"
#include "espalier/device/host_values.h"
#include "espalier/device/scalar_type.h"
#include "espalier/ops/operations.h"

namespace espalier {
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
          options.warmup_steps};
}

double clip_factor(double norm, double max_norm) {
  if (max_norm == 0) return 1;
  return std::min(1.0, max_norm / (norm + 1e-6));
}

double learning_rate(const AdamWSettings& settings, std::int64_t step) {
  if (step > settings.warmup_steps) return settings.lr;
  return settings.lr * static_cast<double>(step - 1) / static_cast<double>(settings.warmup_steps);
}

Group& optimizer_shares(const Options& options, const Mesh& mesh) {
  return options.shard == Sharding::none ? mesh_of_one().dp : mesh.dp;
}

AdamW::AdamW(const ParameterTable& table, const at::Tensor& weights, const AdamWSettings& settings, Device& device,
             Group& shares)
    : table_(table), settings_(settings), device_(device), shares_(shares), weights_(weights) {
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

AdamW::Range AdamW::range_of(int rank) const {
  const std::int64_t part = (table_.size() + shares_.size() - 1) / shares_.size();
  return {std::min(table_.size(), part * rank), std::min(table_.size(), part * (rank + 1))};
}

double AdamW::norm_of(const at::Tensor& gradient) const {
  const at::Tensor sum_1 = device_.allocate({1}, at::kDouble);
  device_.operations().sum_of_squares(gradient, sum_1);
  return std::sqrt(host_values<const double>(device_.to_host(sum_1)).front());
}

AdamW::Update AdamW::step(const at::Tensor& gradient) {
  Update update;
  update.grad_norm = norm_of(gradient);
  if (!std::isfinite(update.grad_norm))
    throw InputError({text_of("optimizer step ", steps_done_ + 1), "a finite gradient",
                      text_of("norm ", update.grad_norm),
                      "the weights are unchanged; check rewards, log-probs and weights for extreme values"});
  update.clip_factor = clip_factor(update.grad_norm, settings_.max_grad_norm);
  update.lr = learning_rate(settings_, ++steps_done_);
  AdamWStep step{update.lr,          settings_.beta1, settings_.beta2, settings_.eps, settings_.weight_decay,
                 update.clip_factor, steps_done_};
  // Neighbours that decay alike are updated at once: no number depends on another.
  const std::vector<Parameter>& parameters = table_.parameters();
  const Range mine = own();
  for (std::size_t first = 0, last; first < parameters.size(); first = last) {
    std::int64_t count = 0;
    for (last = first; last < parameters.size() && decays(parameters[last]) == decays(parameters[first]); ++last)
      count += parameters[last].count;
    step.weight_decay = decays(parameters[first]) ? settings_.weight_decay : 0;
    const std::int64_t begin = std::max(parameters[first].offset, mine.begin);
    const std::int64_t own_count = std::min(parameters[first].offset + count, mine.end) - begin;
    if (own_count <= 0) continue;
    const auto whole = [&](const at::Tensor& flat) { return flat.narrow(0, begin, own_count); };
    const auto part = [&](const at::Tensor& flat) { return flat.narrow(0, begin - mine.begin, own_count); };
    device_.operations().adamw(part(masters_), whole(gradient), part(exp_avg_), part(exp_avg_sq_), step,
                               weights_.scalar_type() == at::kBFloat16 ? whole(weights_) : at::Tensor());
  }
  share_weights();
  return update;
}

void AdamW::share_weights() {
  for (int rank = 0; rank < shares_.size(); ++rank) {
    const Range moved = range_of(rank);
    shares_.broadcast(weights_.narrow(0, moved.begin, moved.end - moved.begin), rank);
  }
}

void AdamW::masters_changed() {
  if (weights_.scalar_type() == at::kBFloat16)
    device_.operations().convert(masters_, weights_.narrow(0, own().begin, own().end - own().begin));
  share_weights();
}

bool AdamW::decays(const Parameter& parameter) const {
  return !settings_.decay_matrices_only || parameter.shape.size() >= 2;
}

}  // namespace espalier
