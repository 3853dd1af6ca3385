#include "espalier/optimizer/adamw.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "espalier/base/mutation.h"
#include "espalier/ops/cpu/adamw_kernels.h"
#include "espalier/ops/cpu/dispatch.h"

namespace espalier {
namespace {

// Calls body with the accumulator type, float or double.
template <class Body>
void dispatch_accumulator(const at::Tensor& flat, Body&& body) {
  if (flat.scalar_type() == at::kDouble)
    body.template operator()<double>();
  else
    body.template operator()<float>();
}

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

AdamW::AdamW(const ParameterTable& table, const at::Tensor& weights, const AdamWSettings& settings)
    : table_(table), settings_(settings), weights_(weights) {
  const at::ScalarType sums = accumulator_type(weights.scalar_type());
  masters_ = weights.scalar_type() == sums ? weights : weights.to(sums);
  exp_avg_ = at::zeros({table.size()}, at::TensorOptions().dtype(sums));
  exp_avg_sq_ = at::zeros({table.size()}, at::TensorOptions().dtype(sums));
}

AdamW::Update AdamW::step(const at::Tensor& gradient) {
  Update update;
  dispatch_accumulator(masters_, [&]<class A>() {
    update.grad_norm = std::sqrt(sum_of_squares(gradient.numel(), pointer<A>(gradient)));
  });
  if (!std::isfinite(update.grad_norm))
    throw InputError({text_of("optimizer step ", steps_done_ + 1), "a finite gradient",
                      text_of("norm ", update.grad_norm),
                      "the weights are unchanged; check rewards, log-probs and weights for extreme values"});
  update.clip_factor = clip_factor(update.grad_norm, settings_.max_grad_norm);
  if (ESPALIER_MUTATION(clip_factor_ignored)) update.clip_factor = 1;
  update.lr = learning_rate(settings_, ++steps_done_);
  const std::int64_t t = ESPALIER_MUTATION(bias_correction_off_by_one) ? steps_done_ + 1 : steps_done_;
  dispatch_accumulator(masters_, [&]<class A>() {
    bfloat16* rounded = weights_.scalar_type() == at::kBFloat16 ? pointer<bfloat16>(weights_) : nullptr;
    for (const Parameter& parameter : table_.parameters()) {
      bool decays = !settings_.decay_matrices_only || parameter.shape.size() >= 2;
      if (ESPALIER_MUTATION(decay_of_everything)) decays = true;
      const AdamWStep step{update.lr,
                           settings_.beta1,
                           settings_.beta2,
                           settings_.eps,
                           decays ? settings_.weight_decay : 0,
                           update.clip_factor,
                           t};
      const std::int64_t at = parameter.offset;
      adamw(parameter.count, pointer<A>(masters_) + at, pointer<A>(gradient) + at, pointer<A>(exp_avg_) + at,
            pointer<A>(exp_avg_sq_) + at, step, rounded ? rounded + at : nullptr);
    }
  });
  return update;
}

}  // namespace espalier
