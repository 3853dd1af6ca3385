// The prefix trees of a step and its schedule, drawn from a PlanPicture. Widths are percentages, so that the drawings
// stretch with the page and their text does not shrink.
#pragma once

#include <cstddef>
#include <string>

#include "espalier/report/plan_picture.h"

namespace espalier {

inline constexpr std::size_t kMostDrawnTrees = 6;

// One figure for each of the first trees: depth in tokens from left to right, rollouts from top to bottom, so that the
// area of a box is what a dense run computes for it and its width what a shared one does.
std::string tree_figures(const PlanPicture& picture);

// Predicted time from left to right, open trunks from top to bottom; where the step is long, its beginning once more,
// enlarged. Empty where nothing ran.
std::string schedule_figures(const PlanPicture& picture);

}  // namespace espalier
