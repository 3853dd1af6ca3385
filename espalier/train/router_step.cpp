#include "espalier/train/router_step.h"

#include <utility>

#include "espalier/base/error.h"
#include "espalier/model/parameters.h"
#include "espalier/observe/timer.h"
#include "espalier/phase/schedule.h"

namespace espalier {
namespace {

moe::RouterLosses router_losses_of(const Options& options) {
  const bool whole = options.router_aux_loss_scope == "minibatch";
  return {options.router_aux_loss_coef, options.router_z_loss_coef,
          whole ? moe::AuxScope::minibatch : moe::AuxScope::rollout};
}

moe::RouterShape router_shape_of(const ModelShape& shape) {
  return {0, shape.experts, shape.experts_per_token, shape.norm_topk_prob};
}

}  // namespace

RouterStep::RouterStep(const Decoder& decoder, std::span<const Rollout> batch, const Options& options)
    : decoder_(decoder), batch_(batch) {
  const moe::RouterLosses losses = router_losses_of(options);
  if (!losses.any()) return;
  const ModelShape& shape = decoder.shape();
  if (shape.experts == 0)
    throw OptionError({losses.aux_coef != 0 ? "--router-aux-loss-coef" : "--router-z-loss-coef", "a model with routers",
                       shape.architecture, "leave the option out for dense models"});
  std::vector<std::int64_t> lengths;
  for (const Rollout& rollout : batch) lengths.push_back(rollout.length());
  accounting_.emplace(shape.layers, router_shape_of(shape), std::move(lengths), losses);
}

void RouterStep::count_choices(const StepPlan& plan, Arena& arena) {
  if (!accounting_ || !accounting_->needs_counting_pass()) return;
  const Timer timer;
  const ArenaScope scope(arena);
  KvPath path(decoder_.shape(), plan.max_path_rows, decoder_.dtype(), false, arena);
  StepRun run{decoder_, batch_, path, arena};
  run.accounting = &*accounting_, run.counts_only = true;
  run_schedule(run, plan);
  accounting_->finish_counting();
  counting_seconds_ = timer.total();
}

RouterReport RouterStep::report() const {
  if (!accounting_) return {};
  RouterReport report{accounting_->aux_loss(),
                      accounting_->z_loss(),
                      accounting_->weighted_loss(),
                      counting_seconds_,
                      accounting_->needs_counting_pass(),
                      {}};
  for (std::int64_t layer = 0; layer < decoder_.shape().layers; ++layer) {
    report.load.emplace_back();
    if (!has_experts(decoder_.shape(), layer)) continue;
    const auto load = accounting_->load(layer);
    report.load.back().assign(load.begin(), load.end());
  }
  return report;
}

}  // namespace espalier
