// Sums a step's gradient over the ranks.
#pragma once

#include "espalier/gradient/gradient_set.h"
#include "espalier/parallel/mesh.h"

namespace espalier {

// Every accumulator <- its sum over the ranks that hold the same weights, over copies within tp, and for a tied
// embedding over the first and the last stage of pp. Bitwise identical on all of these ranks. Called after the last
// backward of a step.
void sum_over_ranks(GradientSet& gradients, const Mesh& mesh);

}  // namespace espalier
