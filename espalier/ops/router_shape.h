// The experts that a router chooses from, for code that counts its choices.
#pragma once

#include <cstdint>

namespace espalier::moe {

struct RouterShape {
  std::int64_t rows = 0, experts = 0, chosen = 0;  // R, E, k
  bool renormalise = false;
};

// Values of the penalties, summed over rows in their order.
struct PenaltySums {
  double aux = 0, z = 0;
};

}  // namespace espalier::moe
