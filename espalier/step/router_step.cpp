#include "espalier/step/router_step.h"

#include <unordered_map>

#include "espalier/base/error.h"
#include "espalier/execute/stage.h"
#include "espalier/model/parameters.h"
#include "espalier/step/step_path.h"

namespace espalier {
namespace {

moe::RouterLosses router_losses_of(const Options& options) {
  return {options.router_aux_loss_coef, options.router_z_loss_coef, options.router_aux_loss_scope};
}

moe::RouterShape router_shape_of(const ModelShape& shape) {
  return {0, shape.experts, shape.experts_per_token, shape.norm_topk_prob};
}

std::vector<std::int64_t> lengths_of(std::span<const Rollout> rollouts) {
  std::vector<std::int64_t> lengths;
  for (const Rollout& rollout : rollouts) lengths.push_back(rollout.length());
  return lengths;
}

// Where each of these rollouts stands among those counted; shorter than they are if one is missing.
std::vector<std::int64_t> places_in(const std::vector<std::int64_t>& counted, std::span<const Rollout> rollouts) {
  std::unordered_map<std::int64_t, std::int64_t> place_of;
  for (const std::int64_t index : counted) place_of.try_emplace(index, static_cast<std::int64_t>(place_of.size()));
  if (place_of.size() != counted.size()) return {};  // indices that say nothing
  std::vector<std::int64_t> places;
  for (const Rollout& rollout : rollouts)
    if (const auto place = place_of.find(rollout.index); place != place_of.end()) places.push_back(place->second);
  return places;
}

}  // namespace

ScoredChoices::ScoredChoices(const ModelState& model, std::span<const Rollout> rollouts)
    : counts(model.shape.layers(), router_shape_of(model.shape), lengths_of(rollouts), {}, true),
      updates(model.updates) {
  for (const Rollout& rollout : rollouts) index.push_back(rollout.index);
}

RouterStep::RouterStep(const ModelState& model, std::span<const Rollout> rollouts, const Options& options,
                       const ScoredChoices* scored)
    : decoder_(model.decoder), rollouts_(rollouts), spill_dir_(options.spill_dir) {
  const moe::RouterLosses losses = router_losses_of(options);
  const ModelShape& shape = model.shape;
  if (shape.experts == 0) {
    if (!losses.any()) return;
    throw OptionError({losses.aux_coef != 0 ? "--router-aux-loss-coef" : "--router-z-loss-coef", "a model with routers",
                       shape.architecture, "leave the option out for dense models"});
  }
  if (losses.any() && shape.router.sigmoid)
    throw OptionError({losses.aux_coef != 0 ? "--router-aux-loss-coef" : "--router-z-loss-coef",
                       "a router whose scores are a softmax",
                       text_of(shape.architecture, ", whose scores are sigmoids"),
                       "leave the option out: its correction bias balances the experts"});
  accounting_.emplace(shape.layers(), router_shape_of(shape), lengths_of(rollouts), losses);
  if (model.mesh.cp.size() > 1) accounting_->count_apart();
  if (!accounting_->needs_counts_first() || scored == nullptr || scored->updates != model.updates) return;
  const std::vector<std::int64_t> places = places_in(scored->index, rollouts);
  if (places.size() != rollouts.size()) return;
  accounting_->take_counts(scored->counts, places);
  took_counts_ = true;
}

void RouterStep::count_choices(const StepPlan& plan, Arena& arena, const moe::ChoiceRecord& choices) {
  if (!accounting_ || !accounting_->needs_counts_first() || took_counts_) return;
  const ArenaScope scope(arena);
  StepPath path(decoder_, plan, false, arena, spill_dir_);
  StepRun run{decoder_, rollouts_, *path, arena};
  run.accounting = &*accounting_;
  run.choices = choices;
  run_stage(run, plan);
  add_over_ranks(decoder_.mesh().replicas, accounting_->all_loads());
  accounting_->finish_counting();
}

RouterReport RouterStep::report() const {
  if (!accounting_) return {};
  RouterReport report;
  const Mesh& mesh = decoder_.mesh();
  std::vector<double> losses{accounting_->aux_loss(), accounting_->z_loss(), accounting_->weighted_loss()};
  losses = sums_over_ranks(mesh.pp, sums_over_ranks(mesh.replicas, std::move(losses)));
  report.aux_loss = losses[0], report.z_loss = losses[1], report.weighted_loss = losses[2];
  report.counts = took_counts_ ? "score pass" : accounting_->needs_counts_first() ? "counting pass" : "update pass";
  const ModelShape& shape = decoder_.local().whole();
  for (std::int64_t layer = 0; layer < shape.layers(); ++layer) {
    report.load.emplace_back();
    const bool counted = layer + 1 < shape.layers() || accounting_->all_rows_choose();
    if (!shape.has_experts(layer) || !counted) continue;
    const auto load = accounting_->load(layer);
    report.load.back().assign(load.begin(), load.end());
    if (!accounting_->needs_counts_first()) add_over_ranks(mesh.replicas, report.load.back());  // others: before
    add_over_ranks(mesh.pp, report.load.back());  // the stage that has the layer has counted
  }
  return report;
}

}  // namespace espalier
