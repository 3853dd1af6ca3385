// `train`: a line a step for a person, one JSON object for a program.
#include "espalier/train/trainer.h"

#include <algorithm>
#include <iomanip>
#include <optional>

#include "cli/profile_text.h"
#include "cli/verbs.h"
#include "espalier/base/error.h"
#include "espalier/base/units.h"
#include "espalier/services/tracker.h"
#include "espalier/step/step_json.h"

namespace espalier::cli {
namespace {

void tell(Context& context, const std::string& note) {
  context.progress.note("note: " + note);
  context.result["notes"].push_back(note);
}

// Why a step could not learn anything; "" where it could.
std::string nothing_to_learn(const StepReport& step) {
  if (step.gradient.loss.loss_tokens == 0) return "no token has loss";
  return step.update.grad_norm == 0 ? "the gradient is 0 (are the rewards of every group equal?)" : "";
}

void print_step(std::ostream& out, const StepReport& step, const Json& line) {
  const GradientReport& g = step.gradient;
  out << "step " << step.step << " of " << line["steps_total"].get<std::int64_t>() << std::setprecision(5);
  if (step.reward) out << "  reward " << *step.reward;
  out << "  loss " << g.loss.loss << "  grad norm " << step.update.grad_norm << "  lr " << step.update.lr
      << "  clipped " << format_percent(g.loss.clip_fraction) << "  tokens computed "
      << format_count(g.trunk_rows + g.wave_rows) << " of " << format_count(g.plan.logical_rows) << " ("
      << schedule_name(g) << ")  " << format_seconds(g.seconds.total) << "  peak " << format_bytes(g.peak_bytes.peak());
  if (const std::string why = nothing_to_learn(step); !why.empty()) out << "  nothing to learn from: " << why;
  out << std::endl;  // seen at once, also through a pipe
}

void print_critic(std::ostream& out, const CriticReport& critic) {
  out << "  critic  loss " << std::setprecision(5) << critic.loss.loss << "  grad norm " << critic.update.grad_norm
      << "  lr " << critic.update.lr << "  clipped " << format_percent(critic.loss.clip_fraction) << "  mean value "
      << critic.loss.values_mean << "  tokens computed " << format_count(critic.trunk_rows + critic.wave_rows) << "  "
      << format_seconds(critic.seconds.total) << std::endl;
}

// Before any update the policy should be the one that sampled: ratios of 1, nothing to clip. Much clipping in the first
// step means that something else gave the old log-probs, and training would go on without another sign of it.
void warn_of_foreign_logprobs(Context& context, const StepReport& step) {
  constexpr double kSuspicious = 0.2, kNarrow = 0.05;  // gspo's narrow range clips what is mere rounding
  const Options& options = context.options;
  const double clipped = step.gradient.loss.clip_fraction;
  if (step.step != 1 || clipped < kSuspicious || std::min(options.clip_ratio_low, options.clip_ratio_high) < kNarrow)
    return;
  tell(context, format_percent(clipped) + " of the tokens are clipped before the first update: old_logprobs are " +
                    "not those of this model. Is it the one that sampled? Is temperature recorded?");
}

}  // namespace

int run_train(Context& context) {
  context.result["steps"] = Json::array();
  std::int64_t steps = 0, empty_steps = 0;
  const Options& options = context.options;
  std::optional<Tracker> tracker;
  if (ReportTargets::from(options).wandb && context.mesh.writes()) tracker.emplace(options, 't', context.progress);
  const auto on_step = [&](const StepReport& step, const Json& line) {
    context.progress.end();  // takes the bar away; the next report draws it again
    const bool shown =
        step.step == 1 || step.step % options.logging_freq == 0 || step.step == line["steps_total"].get<std::int64_t>();
    if (shown) print_step(context.text, step, line);
    warn_of_foreign_logprobs(context, step);
    if (shown && step.critic) print_critic(context.text, *step.critic);
    if (shown && step.gradient.profile) print_profile(context.text, *step.gradient.profile);
    if (tracker) tracker->write(line);
    context.result["steps"].push_back(line);
    context.result["steps"].back().erase("kind");
    ++steps, empty_steps += !nothing_to_learn(step).empty();
  };
  train(context.options, context.progress, on_step, context.mesh);
  if (tracker) tracker->finish();
  if (empty_steps > 0) tell(context, text_of(empty_steps, " of ", steps, " steps had nothing to learn from"));
  for (const OptionRow& row : option_rows()) {
    const PathRole role = path_role(row, 't');
    if (!row.taken_by('t') || role == PathRole::none || role == PathRole::input) continue;
    if (const std::string path = option_text(context.options, row.name); !path.empty())
      context.text << "written: " << path << "\n";
  }
  return 0;
}

}  // namespace espalier::cli
