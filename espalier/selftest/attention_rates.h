// Rates of attention at the shapes of long prompts with many responses, as a training step calls it.
#pragma once

#include <string>
#include <vector>

#include "espalier/device/device.h"
#include "espalier/metrics/progress.h"

namespace espalier {

struct AttentionRate {
  std::string shape;  // what a step calls so
  std::int64_t heads = 1, kv_heads = 1, head_dim = 0, value_dim = 0;
  std::int64_t rows = 0, path_rows = 0,
               branch_rows = 0;                      // own rows, which are queries as well; in branches of a length
  double forward_seconds = 0, backward_seconds = 0;  // of a call

  double pairs() const;          // of a query and a key that it sees, for each head
  double forward_flops() const;  // of the products of these pairs
  double backward_flops() const;
};

// In bfloat16, after calls to warm up. A device that would take long has fewer rows in each shape, by one factor.
std::vector<AttentionRate> measure_attention_rates(Device& device, Progress& progress);

}  // namespace espalier
