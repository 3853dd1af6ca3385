// The seconds and bytes of steps by the page's phases, and sums over them.
#pragma once

#include <string>
#include <vector>

#include "espalier/report/chart.h"

namespace espalier {

// The phases of a step that took time, in running order, and what of the update is in none of them ("other").
std::vector<StackPart> phases_of(const std::vector<Json>& steps);

struct PhaseGroup {
  std::string label;  // generate, score, ..., update
  Points points;
};
std::vector<PhaseGroup> phase_groups(const std::vector<Json>& steps);
Points whole_seconds(const std::vector<Json>& steps);  // the sum of the groups, step by step

double sum_of(const Points& points);
double mean_of(const Points& points);  // 0 of none

// The most bytes of phases A, B, C over all steps; `field` is "/peak_bytes" or "/predicted/peak_bytes".
double peak_of(const std::vector<Json>& steps, const std::string& field);
double peak_of(const std::vector<Json>& steps, const std::string& field, const std::string& phase);

}  // namespace espalier
