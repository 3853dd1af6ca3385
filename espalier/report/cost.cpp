// Seconds and bytes: what each phase took, beside what the plan predicted; and the plan itself as drawings.
#include <algorithm>

#include "espalier/base/error.h"
#include "espalier/report/drawing.h"
#include "espalier/report/phases.h"
#include "espalier/report/sections.h"

namespace espalier {
namespace {

std::string key(const std::string& colour, const std::string& label) {
  return "<span class=\"key\"><i class=\"swatch " + colour + "\"></i>" + escaped(label) + "</span>";
}

std::string phase_table(const std::vector<StackPart>& phases, double whole) {
  std::string rows;
  for (const StackPart& phase : phases) {
    const double mean = sum_of(phase.points) / static_cast<double>(phase.points.size());
    rows += "<tr><th scope=\"row\">" + key(phase.colour, phase.label) + "</th><td>" + shown(mean, Unit::seconds) +
            "</td><td>" + shown(mean / whole, Unit::percent) + "</td></tr>\n";
  }
  return "<table class=\"numbers\"><thead><tr><th scope=\"col\">phase</th><th scope=\"col\">mean of a step</th>"
         "<th scope=\"col\">share</th></tr></thead><tbody>\n" +
         rows + "</tbody></table>";
}

// The plan's seconds cover the phases A, B and C.
Points phase_seconds(const std::vector<Json>& steps) {
  Points out;
  for (const Json& step : steps) {
    const auto a = number_at(step, "/seconds/trunk_forward"), b = number_at(step, "/seconds/waves"),
               c = number_at(step, "/seconds/trunk_backward");
    if (a && b && c) out.emplace_back(step["step"].get<double>(), *a + *b + *c);
  }
  return out;
}

// A bar as wide as `share` of the widest of all.
std::string bar(const std::string& colour, double share, const std::string& text) {
  return "<div class=\"bar\"><span><i class=\"" + colour + "\" style=\"width:" + coordinate(100 * share) +
         "%\"></i></span><b>" + text + "</b></div>";
}

// Where the letters of the phases stand first.
constexpr const char* kPhases =
    "<p class=\"note\">An update has three phases. A, trunk forward: what rollouts share, once. B, waves: everything "
    "else, forward, loss and backward, some rollouts at a time. C, trunk backward: what they share, once. Without "
    "shared "
    "trunks there is B alone.</p>\n";

struct Peaks {
  const char* phase;
  const char* name;
  double measured, predicted, arena;
};

std::string memory_row(const Peaks& peaks, double most) {
  std::string cells =
      "<tr><th scope=\"row\">" + key(std::string("phase") + peaks.phase, peaks.name) + "</th><td>" +
      bar(std::string("phase") + peaks.phase, peaks.measured / most, shown(peaks.measured, Unit::bytes));
  if (peaks.predicted > 0)
    cells += bar("predicted", peaks.predicted / most, shown(peaks.predicted, Unit::bytes) + " predicted");
  cells += "</td><td>" + (peaks.predicted > 0 ? shown(peaks.measured / peaks.predicted, Unit::percent) : "") +
           "</td><td>" + (peaks.arena > 0 ? shown(peaks.arena, Unit::bytes) : "") + "</td></tr>\n";
  return cells;
}

}  // namespace

std::string time_section(const RunRecord& run) {
  const std::vector<StackPart> phases = phases_of(run.steps);
  std::string out;
  if (!phases.empty()) {
    out +=
        "<div class=\"split\"><figure><figcaption><strong>Seconds of a step</strong><br><span class=\"note\">by "
        "phase, over steps</span></figcaption>" +
        stacked_bars("Seconds of a step by phase", Unit::seconds, phases) + "</figure>\n" +
        phase_table(phases, mean_of(whole_seconds(run.steps))) + "</div>\n";
  }
  std::string figures = figure_of(
      {"Against the plan",
       "seconds of A, B and C together",
       Unit::seconds,
       {{"measured", "c1", phase_seconds(run.steps)}, {"predicted", "c3", points_of(run.steps, "/predicted/seconds")}},
       true});
  figures += figure_of({"Tokens of a step",
                        "through the model, forward and backward",
                        Unit::count,
                        {{"computed", "c1", points_of(run.steps, "/rows/physical")},
                         {"unshared", "c3", points_of(run.steps, "/rows/logical")}},
                        true});
  const Points saved = points_of(run.steps, "/tokens_saved");
  figures += figure_of({"Tokens saved",
                        text_of("not computed twice; ", shown(sum_of(saved), Unit::count), " in all"),
                        Unit::count,
                        {{"", "c1", saved}},
                        true});
  if (!figures.empty()) out += "<div class=\"charts\">\n" + figures + "</div>";
  return out.empty() ? "" : "<section><h2>Time</h2>\n" + std::string(kPhases) + out + "</section>\n";
}

std::string memory_section(const RunRecord& run) {
  double most = std::max(peak_of(run.steps, "/peak_bytes"), peak_of(run.steps, "/predicted/peak_bytes"));
  if (most <= 0) return "";
  std::string rows;
  for (const auto& [phase, name] :
       {std::pair("A", "A, trunk forward"), std::pair("B", "B, waves"), std::pair("C", "C, trunk backward")}) {
    const Peaks peaks{phase, name, peak_of(run.steps, "/peak_bytes", phase),
                      peak_of(run.steps, "/predicted/peak_bytes", phase), peak_of(run.steps, "/arena_bytes", phase)};
    if (peaks.measured > 0) rows += memory_row(peaks, most);
  }
  return "<section><h2>Memory</h2>\n<table class=\"numbers memory\"><caption>Most that the process held in each phase, "
         "over all steps</caption><thead><tr><th scope=\"col\">phase</th><th scope=\"col\">measured and predicted</th>"
         "<th scope=\"col\">of the prediction</th><th scope=\"col\">activations</th></tr></thead><tbody>\n" +
         rows + "</tbody></table></section>\n";
}

std::string plan_section(const RunRecord& run) {
  if (!run.picture) return "";
  const PlanPicture& picture = *run.picture;
  const std::string trees = tree_figures(picture), schedule = schedule_figures(picture);
  std::string out = text_of("<section><h2>Prefix trees and schedule</h2>\n<p>Step ", run.picture_step, ": ",
                            shown(static_cast<double>(picture.tree_count), Unit::count),
                            picture.tree_count == 1 ? " tree, " : " trees, ",
                            shown(static_cast<double>(picture.physical), Unit::count), " tokens computed (",
                            shown(static_cast<double>(picture.trunk), Unit::count), " in trunks, ",
                            shown(static_cast<double>(picture.wave), Unit::count), " in waves) instead of ",
                            shown(static_cast<double>(picture.logical), Unit::count), ".</p>\n");
  if (!trees.empty())
    out +=
        "<p class=\"note\">Depth in tokens from left to right, rollouts from top to bottom: the area of a box is what "
        "every rollout on its own would compute, its width is what is computed. " +
        key("prompt", "prompt") + " " + key("shared", "responses that begin alike") + " " +
        key("response", "one response") + "</p>\n<div class=\"trees\">\n" + trees + "</div>\n";
  if (const auto drawn = static_cast<std::int64_t>(std::min(picture.trees.size(), kMostDrawnTrees));
      drawn < picture.tree_count)
    out += text_of("<p class=\"note\">Drawn: the first ", drawn, " of ", picture.tree_count, " trees.</p>\n");
  if (!schedule.empty()) {
    out += "<p class=\"note\">Predicted time from left to right; a wave stands below the trunks that it reads. ";
    if (picture.trunk > 0) out += key("phaseA", "A, trunk forward") + " ";
    out += key("phaseB", "B, wave");
    if (picture.trunk > 0) out += " " + key("phaseC", "C, trunk backward");
    out += "</p>\n" + schedule;
  }
  return out + "</section>\n";
}

}  // namespace espalier
