// The experts that a router chooses from, for code that counts its choices.
#pragma once

#include <cstdint>

namespace espalier::moe {

struct RouterShape {
  std::int64_t rows = 0, experts = 0, chosen = 0;  // R, E, k
  bool renormalise = false;
  bool sigmoid = false;                     // scores p: true: sigmoids of the logits; false: their softmax
  std::int64_t groups = 1, top_groups = 1;  // experts are chosen from the top_groups best groups
  double scaling = 1;                       // of the weights
};

// Values of the penalties, summed over rows in their order.
struct PenaltySums {
  double aux = 0, z = 0;
};

}  // namespace espalier::moe
