// The curves: one chart for each thing that a run of GRPO is judged by.
#include <algorithm>
#include <cmath>
#include <optional>

#include "espalier/base/error.h"
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

// One number over another, step by step.
Points share_of(const RunRecord& run, const char* part, const char* whole) {
  Points out;
  for (const Json& line : run.steps) {
    const auto above = number_at(line, part), below = number_at(line, whole);
    if (above && below && *below > 0) out.emplace_back(line["step"].get<double>(), *above / *below);
  }
  return out;
}

// A curve without a change says in one line what a chart would say.
bool is_flat(const LineChart& chart) {
  std::optional<double> first;
  for (const Series& series : chart.series)
    for (const auto& [step, value] : series.points)
      if (value != first.value_or(value))
        return false;
      else
        first = value;
  return first.has_value();
}

std::string flat_line(const LineChart& chart) {
  for (const Series& series : chart.series)
    if (!series.points.empty())
      return "<tr><th scope=\"row\">" + escaped(chart.title) + "</th><td>" +
             shown(series.points.front().second, chart.unit) + "</td><td class=\"note\">" + escaped(chart.note) +
             "</td></tr>\n";
  return "";
}

// The importance ratios of the last step that has old log-probs.
std::string ratio_figure(const RunRecord& run) {
  const auto last = std::find_if(run.steps.rbegin(), run.steps.rend(), [](const Json& line) {
    return line.contains("ratio_histogram") && line["ratio_histogram"].contains("counts");
  });
  if (last == run.steps.rend()) return "";
  const Json& edges = (*last)["ratio_histogram"]["edges"];
  const Json& counts = (*last)["ratio_histogram"]["counts"];
  if (!edges.is_array() || !counts.is_array() || counts.size() != edges.size() + 1) return "";
  double all = 0;
  for (const Json& count : counts) all += count.is_number() ? count.get<double>() : 0;
  if (all <= 0) return "";
  std::string rows;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const double share = counts[i].get<double>() / all;
    const std::string from = i == 0 ? "below" : shown(edges[i - 1].get<double>(), Unit::number) + " to";
    const std::string to = i == edges.size() ? "and above" : shown(edges[i].get<double>(), Unit::number);
    rows += "<tr><th scope=\"row\">" +
            (i == edges.size() ? shown(edges[i - 1].get<double>(), Unit::number) + " " + to : from + " " + to) +
            "</th><td><div class=\"bar\"><span><i class=\"phaseB\" style=\"width:" + text_of(100 * share) +
            "%\"></i></span><b>" + shown(share, Unit::percent) + "</b></div></td></tr>\n";
  }
  return "<table class=\"numbers ratios\"><caption>Importance ratios of the tokens of step " +
         text_of((*last)["step"].get<std::int64_t>()) + "</caption><tbody>\n" + rows + "</tbody></table>\n";
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
      {"Reward inside groups",
       "mean deviation of a group's rewards: 0 teaches nothing",
       Unit::number,
       {{"", "c2", step("/reward_spread/std")}},
       true},
      {"Groups without variance",
       "share of groups whose rewards are all equal",
       Unit::percent,
       {{"", "c1", share_of(run, "/groups_without_variance", "/groups")}},
       true},
      {"Truncated",
       "share of responses that ended for their length",
       Unit::percent,
       {{"", "c1", step("/truncated")}},
       true},
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
  std::string figures, flat;
  const auto add = [&](const LineChart& chart) {
    if (is_flat(chart) && run.steps.size() > 1)
      flat += flat_line(chart);
    else
      figures += figure_of(chart);
  };
  for (const LineChart& chart : charts) add(chart);
  for (const LineChart& chart : optional)
    if (!all_zero(chart)) add(chart);
  const std::string unchanged = flat.empty() ? ""
                                             : "<details class=\"flat\"><summary>The same in every step</summary>\n"
                                               "<table class=\"numbers\"><tbody>\n" +
                                                   flat + "</tbody></table></details>\n";
  return figures.empty() && unchanged.empty()
             ? ""
             : "<section><h2>Learning</h2>\n<p class=\"note\">Over steps; the number is the last one. A "
               "bold curve on a "
               "thin one is the mean over a twentieth of the steps.</p>\n<div class=\"charts\">\n" +
                   figures + "</div>" + ratio_figure(run) + unchanged + "</section>\n";
}

}  // namespace espalier
