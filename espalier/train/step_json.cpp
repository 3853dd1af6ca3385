#include "espalier/train/step_json.h"

namespace espalier {
namespace {

Json peaks_json(const PhasePeaks& peaks) { return {{"A", peaks.a}, {"B", peaks.b}, {"C", peaks.c}}; }

Json profile_json(const StepProfile& profile) {
  Json out;
  for (const auto& [name, seconds] : profile.seconds) out["seconds"][name] = seconds;
  out["read_seconds"] = profile.read;
  out["product_flops_per_second"] = profile.product_flops_per_second;
  out["measured_flops_per_second"] = profile.measured_flops_per_second;
  out["product_rate_share"] = profile.product_rate_share();
  return out;
}

}  // namespace

std::string schedule_name(const StepPlan& plan) {
  for (const TreePlan& tree : plan.trees)
    if (tree.schedule != plan.trees.front().schedule) return "mixed";
  return plan.trees.empty() ? "dense" : name_of(plan.trees.front().schedule);
}

Json step_json(const StepReport& step) {
  const GradientReport& g = step.gradient;
  Json out;
  out["step"] = step.step;
  out["loss"] = g.loss.loss;
  out["pg_loss"] = g.loss.pg_loss;
  out["kl_loss"] = g.loss.kl_loss;
  out["entropy"] = g.loss.entropy;
  out["aux_loss"] = g.router.aux_loss;
  out["z_loss"] = g.router.z_loss;
  out["clip_fraction"] = g.loss.clip_fraction;
  out["loss_tokens"] = g.loss.loss_tokens;
  out["grad_norm"] = step.update.grad_norm;
  out["lr"] = step.update.lr;
  out["schedule"] = schedule_name(g.plan);
  out["rows"] = {{"logical", g.plan.logical_rows},
                 {"physical", g.trunk_rows + g.wave_rows},
                 {"trunk", g.trunk_rows},
                 {"wave", g.wave_rows}};
  out["trunk_forwards"] = g.trunk_forwards;
  if (!g.router.load.empty()) out["router"] = {{"counting_pass", g.router.counting_pass}, {"load", g.router.load}};
  out["waves"] = g.plan.waves;
  out["seconds"] = {{"total", g.seconds.total},        {"plan", g.seconds.plan},
                    {"counting", g.seconds.counting},  {"trunk_forward", g.seconds.phases.trunk_forward},
                    {"waves", g.seconds.phases.waves}, {"trunk_backward", g.seconds.phases.trunk_backward},
                    {"optimizer", g.seconds.optimizer}};
  out["peak_bytes"] = peaks_json(g.peak_bytes);
  out["arena_bytes"] = peaks_json(g.arena_bytes);
  out["predicted"] = {{"seconds", g.plan.chosen.seconds}, {"peak_bytes", peaks_json(g.plan.chosen.bytes)}};
  if (g.profile) out["profile"] = profile_json(*g.profile);
  return out;
}

}  // namespace espalier
