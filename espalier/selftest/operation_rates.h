// The speed of operations on a device, relative to their bytes and FLOPs.
//
// Bytes and FLOPs come from formulas (docs/mathematics.md): the bytes that an operation must read and write once, and
// the FLOPs of its products.
#pragma once

#include <string>
#include <vector>

#include "espalier/device/device.h"
#include "espalier/forecast/cost_model.h"
#include "espalier/metrics/progress.h"

namespace espalier {

struct OperationRate {
  std::string operation;
  std::int64_t rows = 0;
  double bytes = 0, flops = 0;  // of one call
  double seconds = 0;           // the minimum of a few calls
  double bytes_per_second() const { return bytes / seconds; }
  double flops_per_second() const { return flops / seconds; }
};

// Rates of the operations that dominate a step, in this dtype. The number of rows is raised until a call takes long
// enough to be timed, up to the rows of a wave.
std::vector<OperationRate> measure_operation_rates(Device& device, DType dtype, Progress& progress);

// FLOPs per second of a matrix product with `rows` rows on a device.
double product_flops_per_second(Device& device, DType dtype, std::int64_t rows);

// A machine profile made from the rates, for plan --machine FILE.
MachineProfile profile_of_rates(Device& device, DType dtype, const std::vector<OperationRate>& rates);

}  // namespace espalier
