// The curves: one chart for each thing that a run of GRPO is judged by.
#include <algorithm>
#include <cmath>

#include "espalier/report/chart.h"
#include "espalier/report/sections.h"

namespace espalier {
namespace {

bool all_zero(const LineChart& chart) {
  for (const Series& series : chart.series)
    for (const auto& [step, value] : series.points)
      if (value != 0) return false;
  return true;
}

// On-policy the loss says nothing: ratios are 1, so it is minus the mean of advantages that add up to 0 in a group.
std::string loss_note(const RunRecord& run, const Points& policy) {
  constexpr double kRounding = 1e-5;  // of sums of some thousand float32 advantages of about 1
  const Points clipped = points_of(run.steps, "/clip_fraction");
  const auto small = [&](const Points& points, double most) {
    return !points.empty() && std::ranges::all_of(points, [&](const auto& at) { return std::abs(at.second) <= most; });
  };
  if (!small(clipped, 0)) return "what the update minimises";
  if (small(policy, kRounding))
    return "0 by construction: ratios are 1 and a group's advantages add up to 0; its gradient is not";
  return "near 0 by construction: ratios are 1 and a group's advantages add up to 0";
}

}  // namespace

std::string learning_section(const RunRecord& run) {
  const auto step = [&](const char* field) { return points_of(run.steps, field); };
  const auto held_out = [&](const char* field) { return points_of(run.evaluations, field); };
  const auto warm = [&](const char* field) { return points_of(run.warm_start, field); };
  Points length = held_out("/length");
  if (length.empty()) length = held_out("/length/mean");
  const Points loss = step("/loss"), policy = step("/pg_loss");
  const std::vector<LineChart> charts = {
      {"Accuracy",
       "right answers; held out: greedy, training: sampled",
       Unit::percent,
       {{"held out", "c1", held_out("/accuracy"), true}, {"training", "c2", step("/accuracy")}},
       true},
      {"Reward",
       "mean over the rollouts of a step",
       Unit::number,
       {{"training", "c2", step("/reward")}, {"held out", "c1", held_out("/reward"), true}}},
      {"Loss",
       loss_note(run, policy),
       Unit::number,
       {{"loss", "c1", loss}, {"policy", "c2", policy == loss ? Points() : policy}}},
      {"Response length",
       "tokens",
       Unit::number,
       {{"mean", "c2", step("/length/mean")}, {"longest", "c3", step("/length/max")}, {"held out", "c1", length, true}},
       true},
      {"Entropy", "nats a token; falling means surer", Unit::number, {{"", "c1", step("/entropy")}}, true},
      {"Gradient norm", "before clipping", Unit::number, {{"", "c1", step("/grad_norm")}}, true},
      {"Learning rate", "", Unit::number, {{"", "c1", step("/lr")}}, true, true},
      {"Critic", "loss of the value model", Unit::number, {{"", "c1", step("/critic/loss")}}, true},
      {"Critic's gradient norm", "before clipping", Unit::number, {{"", "c1", step("/critic/grad_norm")}}, true},
      {"Warm start", "loss of the supervised steps before the loop", Unit::number, {{"", "c1", warm("/loss")}}, true},
      {"Warm start, answers", "share of right ones", Unit::percent, {{"", "c1", warm("/right")}}, true},
  };
  // These say nothing where they are zero throughout: their term is off, or the data are the policy's own.
  const std::vector<LineChart> optional = {
      {"KL to the reference", "loss term, before its coefficient", Unit::number, {{"", "c1", step("/kl_loss")}}, true},
      {"Clip fraction",
       "share of tokens whose ratio is clipped",
       Unit::percent,
       {{"", "c1", step("/clip_fraction")}},
       true},
      {"Router balance loss", "before its coefficient", Unit::number, {{"", "c1", step("/aux_loss")}}, true},
      {"Router z-loss", "before its coefficient", Unit::number, {{"", "c1", step("/z_loss")}}, true},
      {"Groups dropped", "all rewards equal", Unit::count, {{"", "c1", step("/groups_dropped")}}, true},
  };
  std::string figures;
  for (const LineChart& chart : charts) figures += figure_of(chart);
  for (const LineChart& chart : optional)
    if (!all_zero(chart)) figures += figure_of(chart);
  return figures.empty() ? ""
                         : "<section><h2>Learning</h2>\n<p class=\"note\">Over steps; the number is the last one. A "
                           "bold curve on a "
                           "thin one is the mean over a twentieth of the steps.</p>\n<div class=\"charts\">\n" +
                               figures + "</div></section>\n";
}

}  // namespace espalier
