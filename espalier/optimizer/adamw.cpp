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

AdamW::AdamW(const ParameterTable& table, const at::Tensor& weights, const AdamWSettings& settings, Device& device)
    : table_(table), settings_(settings), device_(device), weights_(weights) {
  const Operations& ops = device.operations();
  const at::ScalarType sums = accumulator_type(weights.scalar_type());
  masters_ = weights;
  if (weights.scalar_type() != sums) {
    masters_ = device.allocate({table.size()}, sums);
    ops.convert(weights, masters_);
  }
  for (at::Tensor* moment : {&exp_avg_, &exp_avg_sq_}) {
    *moment = device.allocate({table.size()}, sums);
    ops.zero(*moment);
  }
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
  for (std::size_t first = 0, last; first < parameters.size(); first = last) {
    std::int64_t count = 0;
    for (last = first; last < parameters.size() && decays(parameters[last]) == decays(parameters[first]); ++last)
      count += parameters[last].count;
    step.weight_decay = decays(parameters[first]) ? settings_.weight_decay : 0;
    const auto run = [&](const at::Tensor& flat) { return flat.narrow(0, parameters[first].offset, count); };
    device_.operations().adamw(run(masters_), run(gradient), run(exp_avg_), run(exp_avg_sq_), step,
                               weights_.scalar_type() == at::kBFloat16 ? run(weights_) : at::Tensor());
  }
  return update;
}

bool AdamW::decays(const Parameter& parameter) const {
  return !settings_.decay_matrices_only || parameter.shape.size() >= 2;
}

}  // namespace espalier
