// `replay`: of a trace a line a checkpoint and the largest differences of the steps; of other rollouts a line a step.
#include "espalier/replay/replay.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iomanip>

#include "cli/verbs.h"
#include "espalier/base/error.h"
#include "espalier/replay/rollout_replay.h"

namespace espalier::cli {
namespace {

Json number_or_null(const std::optional<double>& value) { return value ? Json(*value) : Json(nullptr); }

Json logprobs_json(const std::optional<LogprobDifference>& d) {
  if (!d) return nullptr;
  return {{"tokens", d->tokens}, {"max_abs", d->max_abs}, {"mean_abs", d->mean_abs}, {"kl", d->kl}};
}

Json report_json(const ReplayReport& report) {
  Json steps = Json::array(), checkpoints = Json::array();
  for (const ReplayStep& s : report.steps)
    steps.push_back({{"step", s.step},
                     {"loss", s.loss},
                     {"recorded_loss", number_or_null(s.recorded_loss)},
                     {"grad_norm", s.grad_norm},
                     {"recorded_grad_norm", number_or_null(s.recorded_grad_norm)},
                     {"logprobs", logprobs_json(s.logprobs)}});
  for (const CheckpointDifference& c : report.checkpoints)
    checkpoints.push_back({{"step", c.step},
                           {"max_abs", c.max_abs},
                           {"mean_abs", c.mean_abs},
                           {"rms", c.rms},
                           {"movement_rel_l2", c.movement_rel_l2}});
  return {{"steps", steps}, {"checkpoints", checkpoints}};
}

void print_checkpoint(std::ostream& out, const CheckpointDifference& c) {
  out << "after step " << std::setw(6) << c.step << std::scientific << std::setprecision(2) << std::setw(12)
      << c.max_abs << std::setw(12) << c.mean_abs << std::setw(12) << c.rms << std::setw(16) << c.movement_rel_l2
      << std::defaultfloat << "\n";
}

void print_steps(std::ostream& out, const ReplayReport& report) {
  double loss = 0, norm = 0;
  for (const ReplayStep& s : report.steps) {
    if (s.recorded_loss) loss = std::max(loss, std::abs(s.loss - *s.recorded_loss));
    if (s.recorded_grad_norm) norm = std::max(norm, std::abs(s.grad_norm / *s.recorded_grad_norm - 1));
  }
  out << "over " << report.steps.size() << " steps: loss within " << std::scientific << std::setprecision(2) << loss
      << ", gradient norm within " << norm << " (relative) of what was recorded\n"
      << std::defaultfloat;
}

// A trace runs with the options it was recorded with; what would change them is refused, not ignored.
void check_trace_options(const Options& options) {
  const Options defaults;
  for (const OptionRow& row : option_rows()) {
    const std::string section = row.section, field = row.field;
    const bool fixed =
        section == "Objective" || section == "Optimizer" || section == "Mini-batches" || field == "model";
    const std::string given = option_text(options, row.name);
    if (fixed && row.taken_by('r') && given != option_text(defaults, row.name))
      throw OptionError({std::string("--") + row.name,
                         "no such option for a trace, which runs with the options of trace.json", given,
                         "leave it out; it applies to rollouts, not to traces"});
  }
}

int replay_trace(Context& context) {
  check_trace_options(context.options);
  bool begun = false;
  auto print = [&](const CheckpointDifference& c) {
    context.progress.end();  // takes the bar away; the next report draws it again
    if (!begun) context.text << "weights against the record   max |d|    mean |d|         rms   movement (relative)\n";
    begun = true;
    print_checkpoint(context.text, c);
  };
  const ReplayReport report = replay(context.arguments.front(), context.options, context.progress, print, context.mesh);
  print_steps(context.text, report);
  context.result.update(report_json(report));
  return 0;
}

void print_step(std::ostream& out, const ReplayStep& s) {
  out << std::setw(8) << s.step << std::scientific << std::setprecision(4) << std::setw(13) << s.loss << std::setw(13)
      << s.grad_norm;
  if (s.logprobs)
    out << std::setprecision(2) << std::setw(13) << s.logprobs->max_abs << std::setw(12) << s.logprobs->mean_abs
        << std::setw(12) << s.logprobs->kl;
  else
    out << "   no old_logprobs are recorded";
  out << std::defaultfloat << "\n";
}

int replay_records(Context& context) {
  bool begun = false;
  auto print = [&](const ReplayStep& step) {
    context.progress.end();
    if (!begun) context.text << "    step         loss    grad norm   log-probs: max |d|  mean |d|          kl\n";
    begun = true;
    print_step(context.text, step);
  };
  const ReplayReport report =
      replay_rollouts(context.arguments.front(), context.options, context.progress, print, context.mesh);
  context.result.update(report_json(report));
  return 0;
}

}  // namespace

int run_replay(Context& context) {
  const bool trace = std::filesystem::exists(std::filesystem::path(context.arguments.front()) / "trace.json");
  return trace ? replay_trace(context) : replay_records(context);
}

}  // namespace espalier::cli
