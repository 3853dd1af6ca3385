// Sums a step's gradient over the ranks.
#pragma once

#include "espalier/gradient/gradient_set.h"
#include "espalier/parallel/mesh.h"

namespace espalier {

// Every accumulator <- its sum over the ranks that hold the same weights, those that hold copies of it within tp, and,
// of a tied embedding, the stages of pp that do; the same bits on all of them. After the last backward of the step.
void sum_over_ranks(GradientSet& gradients, const Mesh& mesh);

}  // namespace espalier
