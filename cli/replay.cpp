// `replay`: a line a checkpoint, and the largest differences of the steps.
#include "espalier/replay/replay.h"

#include <algorithm>
#include <cmath>
#include <iomanip>

#include "cli/verbs.h"

namespace espalier::cli {
namespace {

Json number_or_null(const std::optional<double>& value) { return value ? Json(*value) : Json(nullptr); }

Json report_json(const ReplayReport& report) {
  Json steps = Json::array(), checkpoints = Json::array();
  for (const ReplayStep& s : report.steps)
    steps.push_back({{"step", s.step},
                     {"loss", s.loss},
                     {"recorded_loss", number_or_null(s.recorded_loss)},
                     {"grad_norm", s.grad_norm},
                     {"recorded_grad_norm", number_or_null(s.recorded_grad_norm)}});
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

}  // namespace

int run_replay(Context& context) {
  bool begun = false;
  auto print = [&](const CheckpointDifference& c) {
    context.progress.end();  // takes the bar away; the next report draws it again
    if (!begun) context.text << "weights against the record   max |d|    mean |d|         rms   movement (relative)\n";
    begun = true;
    print_checkpoint(context.text, c);
  };
  const ReplayReport report = replay(context.arguments.front(), context.options, context.progress, print);
  print_steps(context.text, report);
  context.result.update(report_json(report));
  return 0;
}

}  // namespace espalier::cli
