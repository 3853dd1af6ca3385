// `train`: a line a step for a person, one JSON object for a program.
#include "espalier/train/trainer.h"

#include <iomanip>

#include "cli/profile_text.h"
#include "cli/verbs.h"
#include "espalier/base/units.h"
#include "espalier/train/step_json.h"

namespace espalier::cli {
namespace {

void print_step(std::ostream& out, const StepReport& step) {
  const GradientReport& g = step.gradient;
  out << "step " << step.step << "  loss " << std::setprecision(5) << g.loss.loss << "  grad norm "
      << step.update.grad_norm << "  lr " << step.update.lr << "  clipped " << format_percent(g.loss.clip_fraction)
      << "  rows " << format_count(g.trunk_rows + g.wave_rows) << " of " << format_count(g.plan.logical_rows) << " ("
      << schedule_name(g.plan) << ")  " << format_seconds(g.seconds.total) << "  peak "
      << format_bytes(g.peak_bytes.peak()) << std::endl;  // seen at once, also through a pipe
}

void print_critic(std::ostream& out, const CriticReport& critic) {
  out << "  critic  loss " << std::setprecision(5) << critic.loss.loss << "  grad norm " << critic.update.grad_norm
      << "  lr " << critic.update.lr << "  clipped " << format_percent(critic.loss.clip_fraction) << "  mean value "
      << critic.loss.values_mean << "  rows " << format_count(critic.trunk_rows + critic.wave_rows) << "  "
      << format_seconds(critic.seconds.total) << std::endl;
}

}  // namespace

int run_train(Context& context) {
  context.result["steps"] = Json::array();
  train(context.options, context.progress, [&](const StepReport& step) {
    context.progress.end();  // takes the bar away; the next report draws it again
    print_step(context.text, step);
    if (step.critic) print_critic(context.text, *step.critic);
    if (step.gradient.profile) print_profile(context.text, *step.gradient.profile);
    context.result["steps"].push_back(step_json(step));
  });
  if (!context.options.out.empty()) context.text << "written: " << context.options.out << "\n";
  return 0;
}

}  // namespace espalier::cli
