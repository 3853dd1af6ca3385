// `train`: a line a step for a person, one JSON object for a program.
#include "espalier/train/trainer.h"

#include <iomanip>

#include "cli/profile_text.h"
#include "cli/verbs.h"
#include "espalier/base/units.h"

namespace espalier::cli {
namespace {

Json peaks_json(const PhasePeaks& peaks) { return {{"A", peaks.a}, {"B", peaks.b}, {"C", peaks.c}}; }

// One name where all trees run alike.
std::string schedule_of(const StepPlan& plan) {
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
  out["schedule"] = schedule_of(g.plan);
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

void print_step(std::ostream& out, const StepReport& step) {
  const GradientReport& g = step.gradient;
  out << "step " << step.step << "  loss " << std::setprecision(5) << g.loss.loss << "  grad norm "
      << step.update.grad_norm << "  lr " << step.update.lr << "  clipped " << format_percent(g.loss.clip_fraction)
      << "  rows " << format_count(g.trunk_rows + g.wave_rows) << " of " << format_count(g.plan.logical_rows) << " ("
      << schedule_of(g.plan) << ")  " << format_seconds(g.seconds.total) << "  peak "
      << format_bytes(g.peak_bytes.peak()) << std::endl;  // seen at once, also through a pipe
}

}  // namespace

int run_train(Context& context) {
  context.result["steps"] = Json::array();
  train(context.options, context.progress, [&](const StepReport& step) {
    context.progress.end();  // takes the bar away; the next report draws it again
    print_step(context.text, step);
    if (step.gradient.profile) print_profile(context.text, *step.gradient.profile);
    context.result["steps"].push_back(step_json(step));
  });
  if (!context.options.out.empty()) context.text << "written: " << context.options.out << "\n";
  return 0;
}

}  // namespace espalier::cli
