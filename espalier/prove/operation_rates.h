// The speed of operations on a device, relative to their bytes and FLOPs.
//
// Bytes are those that an operation has to read and write once, FLOPs those of its products (docs/mathematics.md); a
// formula, not a count.
#pragma once

#include <string>
#include <vector>

#include "espalier/device/device.h"
#include "espalier/forecast/cost_model.h"
#include "espalier/observe/progress.h"

namespace espalier {

struct OperationRate {
  std::string operation;
  std::int64_t rows = 0;
  double bytes = 0, flops = 0;  // of one call
  double seconds = 0;           // the least of a few calls
  double bytes_per_second() const { return bytes / seconds; }
  double flops_per_second() const { return flops / seconds; }
};

// Rates of the operations that dominate a step, in this dtype: more rows from one call to the next until a call takes
// long enough to be timed, at most as many as a wave has.
std::vector<OperationRate> measure_operation_rates(Device& device, DType dtype, Progress& progress);

// Floating-point operations a second of a matrix product with `rows` rows on a device.
double product_flops_per_second(Device& device, DType dtype, std::int64_t rows);

// The rates as a machine that steps can be planned for (plan --machine FILE).
MachineProfile profile_of_rates(Device& device, DType dtype, const std::vector<OperationRate>& rates);

}  // namespace espalier
