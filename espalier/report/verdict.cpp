// The head of the page: did it learn, how long does a step take, what did sharing save, was the memory as predicted.

#include "espalier/base/error.h"
#include "espalier/report/phases.h"
#include "espalier/report/sections.h"

namespace espalier {
namespace {

std::string tile(const std::string& name, const std::string& value, const std::string& below) {
  return "<div class=\"tile\"><dt>" + escaped(name) + "</dt><dd>" + value + "</dd><dd class=\"note\">" +
         escaped(below) + "</dd></div>\n";
}

// "before -> after" of the first series that has numbers.
std::string outcome_tile(const RunRecord& run) {
  struct Candidate {
    const std::vector<Json>& lines;
    const char* field;
    const char* name;
    Unit unit;
  };
  for (const Candidate& each :
       {Candidate{run.evaluations, "/accuracy", "accuracy, held out", Unit::percent},
        Candidate{run.evaluations, "/reward", "reward, held out", Unit::number},
        Candidate{run.steps, "/reward", "reward", Unit::number}, Candidate{run.steps, "/loss", "loss", Unit::number},
        Candidate{run.warm_start, "/loss", "loss of the warm start", Unit::number}}) {
    const Points points = points_of(each.lines, each.field);
    if (points.empty()) continue;
    const auto [first, before] = points.front();
    const auto [last, after] = points.back();
    const std::string now = shown(after, each.unit);
    if (points.size() == 1) return tile(each.name, now, "at step " + shown(last, Unit::count));
    return tile(each.name, "<span class=\"before\">" + shown(before, each.unit) + " &rarr;</span> " + now,
                "step " + shown(first, Unit::count) + " to step " + shown(last, Unit::count));
  }
  return "";
}

std::string seconds_tile(const RunRecord& run) {
  const Points whole = whole_seconds(run.steps);
  if (whole.empty()) return "";
  std::string below = text_of("mean of ", whole.size(), whole.size() == 1 ? " step" : " steps");
  std::string parts;
  for (const PhaseGroup& group : phase_groups(run.steps))
    parts += text_of(parts.empty() ? "" : ", ", group.label, " ", shown(mean_of(group.points), Unit::seconds));
  if (phase_groups(run.steps).size() > 1) below += ": " + parts;
  return tile("time of a step", shown(mean_of(whole), Unit::seconds), below);
}

std::string rows_tile(const RunRecord& run) {
  const double logical = sum_of(points_of(run.steps, "/rows/logical"));
  const double physical = sum_of(points_of(run.steps, "/rows/physical"));
  if (logical <= 0) return "";
  return tile("tokens saved by sharing", shown(1 - physical / logical, Unit::percent),
              shown(physical, Unit::count) + " computed, " + shown(logical, Unit::count) + " without sharing");
}

std::string memory_tile(const RunRecord& run) {
  const double measured = peak_of(run.steps, "/peak_bytes"), predicted = peak_of(run.steps, "/predicted/peak_bytes");
  if (measured <= 0) return "";
  return tile("peak memory", shown(measured, Unit::bytes),
              predicted > 0 ? "predicted " + shown(predicted, Unit::bytes) + ", measured is " +
                                  shown(measured / predicted, Unit::percent) + " of it"
                            : "of the updates");
}

std::string speed_tile(const RunRecord& run) {
  const Points speed = points_of(run.steps, "/tokens_per_second"), share = points_of(run.steps, "/mfu");
  if (speed.empty()) return "";
  return tile("tokens per second", shown(mean_of(speed), Unit::count),
              share.empty() ? "of an update"
                            : "at " + shown(mean_of(share), Unit::percent) + " of this machine's product rate");
}

// Said where measured and predicted seconds part by more than a factor of kApart.
std::string prediction_note(const RunRecord& run) {
  constexpr double kApart = 1.3;
  double measured = 0, predicted = 0;
  for (const Json& line : run.steps) {
    const auto a = number_at(line, "/seconds/trunk_forward"), b = number_at(line, "/seconds/waves"),
               c = number_at(line, "/seconds/trunk_backward"), plan = number_at(line, "/predicted/seconds");
    if (a && b && c && plan) measured += *a + *b + *c, predicted += *plan;
  }
  if (measured <= 0 || predicted <= 0 || (measured < kApart * predicted && predicted < kApart * measured)) return "";
  const bool slower = measured > predicted;
  return "<p class=\"warning\" role=\"note\">Updates took " +
         shown(slower ? measured / predicted : predicted / measured, Unit::number) + " times " +
         (slower ? "as long as" : "less time than") +
         " planned. <code>espalier bench</code> fits the plan to this machine; a busy machine also explains it.</p>\n";
}

}  // namespace

std::string verdict_section(const RunRecord& run) {
  return "<dl class=\"tiles\">\n" + outcome_tile(run) + seconds_tile(run) + rows_tile(run) + memory_tile(run) +
         speed_tile(run) + "</dl>\n" + prediction_note(run);
}

}  // namespace espalier
