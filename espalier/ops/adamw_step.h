// The numbers of one AdamW update.
#pragma once

#include <cstdint>

namespace espalier {

struct AdamWStep {
  double lr = 1e-6;
  double beta1 = 0.9, beta2 = 0.999;
  double eps = 1e-8;           // outside the root
  double weight_decay = 0.01;  // decoupled, scaled by lr
  double grad_scale = 1;       // the clipping factor
  std::int64_t step = 1;       // t of the bias corrections; the first step is 1
};

}  // namespace espalier
