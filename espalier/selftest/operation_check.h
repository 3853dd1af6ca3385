// Compares every operation of a device with the CPU's result in float64, on the same inputs.
//
// Inputs are random and rounded to the dtype first, so both sides compute from the same numbers. An error is the
// largest difference of a result, relative to the largest value of the CPU's answer, or to `least` if that is larger.
// The largest allowed error is
//   roundings u(dtype) + terms u(accumulator),  u the unit roundoff: 2^-8, 2^-24, 2^-53
// where `roundings` counts the roundings to the dtype before a result is reached, and `terms` the additions (and the
// roundings of exp and log) in the accumulator, each times the ratio of its summands to the result. Integers must be
// equal.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "espalier/base/dtype.h"
#include "espalier/device/device.h"
#include "espalier/ops/operations.h"

namespace espalier {

// An operation on certain sizes. Arguments are float64 or int32 host tensors. On the device an `activation` has the
// dtype under test, a `sum` its accumulator dtype, and a `fixed` argument its dtype on the host.
struct OperationCase {
  enum class Kind { activation, sum, fixed };
  struct Argument {
    at::Tensor value;
    Kind kind = Kind::activation;
    bool result = false;
    double least = 0;  // for a difference that may vanish: the size of its terms
  };

  std::string operation, sizes;
  std::vector<Argument> arguments;
  // Calls the operation with the arguments in their order.
  std::function<void(const Operations&, const std::vector<at::Tensor>&)> call;
  double roundings = 1, terms = 0;
};

struct OperationCheck {
  std::string operation, sizes;
  DType dtype;
  double error = 0, allowed = 0;
  bool same_bits = true;                                       // a second run gave the same bits
  bool pass() const { return same_bits && error <= allowed; }  // false if the error is NaN
};

// The cases, with sizes below, at and above the sizes that a thread, a warp, a block and a pass of the kernels handle.
std::vector<OperationCase> row_cases();
std::vector<OperationCase> moving_cases();
std::vector<OperationCase> product_cases();
std::vector<OperationCase> attention_cases();
std::vector<OperationCase> head_cases();
std::vector<OperationCase> expert_cases();
std::vector<OperationCase> optimizer_cases();
std::vector<OperationCase> state_cases();    // layers whose rows carry a state, and gates
std::vector<OperationCase> variant_cases();  // other norms, rotations, activations, routers and experts than Llama's
std::vector<OperationCase> all_operation_cases();

// The device's results of a case, on the host, in float64 or as integers.
std::vector<at::Tensor> results_on(Device& device, const OperationCase& each, DType dtype);
// The CPU's answer in float64 for the same inputs, and the comparison of results with it.
std::vector<at::Tensor> answer_of_cpu(const OperationCase& each, DType dtype);
OperationCheck compared(const OperationCase& each, DType dtype, const std::vector<at::Tensor>& results,
                        const std::vector<at::Tensor>& answer);
bool same_bits(const std::vector<at::Tensor>& results, const std::vector<at::Tensor>& others);
// Runs the case twice on the device and compares: the results with the CPU's, and both runs with each other.
OperationCheck check_operation(Device& device, const OperationCase& each, DType dtype);

// Numbers of a standard normal distribution; the same for the same seed and sizes.
inline double root(std::int64_t count) { return std::sqrt(static_cast<double>(count)); }
at::Tensor normal(at::IntArrayRef sizes, std::uint64_t seed, double scale = 1);
at::Tensor whole_numbers(const std::vector<std::int32_t>& values);

}  // namespace espalier
