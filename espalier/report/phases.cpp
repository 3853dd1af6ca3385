#include "espalier/report/phases.h"

#include <algorithm>

#include "espalier/base/error.h"

namespace espalier {
namespace {

struct Phase {
  const char* label;
  const char* colour;
  const char* field;
};
// The parts of a step besides the update of the actor.
constexpr Phase kBeside[] = {{"generate", "generate", "/seconds/generate"},
                             {"score", "score", "/seconds/score"},
                             {"critic's values", "values", "/critic/seconds/values"},
                             {"critic's update", "critic", "/critic/seconds/total"}};
constexpr Phase kUpdate[] = {{"plan", "plan", "/seconds/plan"},
                             {"counting pass", "counting", "/seconds/counting"},
                             {"A, trunk forward", "phaseA", "/seconds/trunk_forward"},
                             {"B, waves", "phaseB", "/seconds/waves"},
                             {"C, trunk backward", "phaseC", "/seconds/trunk_backward"},
                             {"optimizer", "optimizer", "/seconds/optimizer"}};

std::optional<double> update_seconds(const Json& step) {
  const auto update = number_at(step, "/seconds/update");
  return update ? update : number_at(step, "/seconds/total");
}

}  // namespace

std::vector<StackPart> phases_of(const std::vector<Json>& steps) {
  std::vector<StackPart> out;
  for (const Phase& phase : kBeside) out.push_back({phase.label, phase.colour, points_of(steps, phase.field)});
  for (const Phase& phase : kUpdate) out.push_back({phase.label, phase.colour, points_of(steps, phase.field)});
  StackPart other{"other", "other", {}};
  for (const Json& step : steps) {
    const auto whole = update_seconds(step);
    if (!whole) continue;
    double named = 0;
    for (const Phase& phase : kUpdate) named += number_at(step, phase.field).value_or(0);
    other.points.emplace_back(step["step"].get<double>(), std::max(0.0, *whole - named));
  }
  out.push_back(std::move(other));
  double whole = 0;
  for (const StackPart& part : out) whole += sum_of(part.points);
  // Below half a tenth of a percent is reading the clock.
  std::erase_if(out, [&](const StackPart& part) { return sum_of(part.points) <= 5e-4 * whole; });
  return out;
}

std::vector<PhaseGroup> phase_groups(const std::vector<Json>& steps) {
  std::vector<PhaseGroup> out;
  for (const Phase& phase : kBeside) out.push_back({phase.label, points_of(steps, phase.field)});
  out.push_back({"update", {}});
  for (const Json& step : steps)
    if (const auto update = update_seconds(step)) out.back().points.emplace_back(step["step"].get<double>(), *update);
  std::erase_if(out, [](const PhaseGroup& group) { return sum_of(group.points) <= 0; });
  return out;
}

Points whole_seconds(const std::vector<Json>& steps) {
  Points out;
  for (const Json& step : steps) {
    const auto update = update_seconds(step);
    if (!update) continue;
    double sum = *update;
    for (const Phase& phase : kBeside) sum += number_at(step, phase.field).value_or(0);
    out.emplace_back(step["step"].get<double>(), sum);
  }
  return out;
}

double sum_of(const Points& points) {
  double sum = 0;
  for (const auto& [step, value] : points) sum += value;
  return sum;
}

double mean_of(const Points& points) {
  return points.empty() ? 0 : sum_of(points) / static_cast<double>(points.size());
}

double peak_of(const std::vector<Json>& steps, const std::string& field, const std::string& phase) {
  double most = 0;
  for (const auto& [step, value] : points_of(steps, text_of(field, "/", phase))) most = std::max(most, value);
  return most;
}

double peak_of(const std::vector<Json>& steps, const std::string& field) {
  return std::max({peak_of(steps, field, "A"), peak_of(steps, field, "B"), peak_of(steps, field, "C")});
}

}  // namespace espalier
