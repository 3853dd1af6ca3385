// Gradients of ranks that hold the same weights, summed once a step.
#pragma once

#include <cstdint>

#include "espalier/gradient/gradient_set.h"
#include "espalier/parallel/mesh.h"

namespace espalier {

// One collective takes this much at most, so that no buffer of the communication library is as large as the model.
inline constexpr std::int64_t kBucketBytes = std::int64_t{64} << 20;

// Every accumulator <- its sum over the ranks that hold the same weights, a tied embedding's over the stages of pp that
// do; the same bits on all of them. Of weights that ranks divide the former were summed item by item
// (gradient/scattered_gradients.h). After the last backward of the step.
void sum_over_ranks(GradientSet& gradients, const Mesh& mesh);

}  // namespace espalier
