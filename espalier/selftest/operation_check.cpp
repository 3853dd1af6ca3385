#include "espalier/selftest/operation_check.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>

#include <algorithm>
#include <cmath>

#include "espalier/device/scalar_type.h"

namespace espalier {
namespace {

double roundoff(at::ScalarType dtype) {
  return dtype == at::kDouble ? 0x1p-53 : dtype == at::kFloat ? 0x1p-24 : 0x1p-8;
}

// The arguments in the types that they have where this dtype runs.
std::vector<at::Tensor> arguments_of(const OperationCase& each, at::ScalarType dtype) {
  std::vector<at::Tensor> arguments;
  for (const auto& [value, kind, result, least] : each.arguments)
    arguments.push_back(!value.defined() || kind == OperationCase::Kind::fixed ? value
                        : kind == OperationCase::Kind::sum                     ? value.to(accumulator_type(dtype))
                                                                               : value.to(dtype));
  return arguments;
}

at::Tensor widened(const at::Tensor& value) { return value.is_floating_point() ? value.to(at::kDouble) : value; }

// On copies: operations write to their arguments.
std::vector<at::Tensor> run_on(Device& device, const OperationCase& each, const std::vector<at::Tensor>& arguments) {
  std::vector<at::Tensor> on_device, results;
  for (const at::Tensor& argument : arguments)
    on_device.push_back(argument.defined() ? device.adopt(argument.clone()) : argument);
  each.call(device.operations(), on_device);
  for (std::size_t i = 0; i < arguments.size(); ++i)
    if (each.arguments[i].result) results.push_back(widened(device.to_host(on_device[i])));
  return results;
}

double largest(const at::Tensor& value) { return value.numel() == 0 ? 0 : value.abs().max().item<double>(); }

// Relative to the largest number of the answer, at least to `least`; of whole numbers absolute. An answer that
// vanishes, as the gradient of the query of a row that sees one key, is a difference of numbers as large as the other
// results: `others`.
double difference(const at::Tensor& got, const at::Tensor& want, double least, double others) {
  const double error = largest(got.to(at::kDouble) - want.to(at::kDouble));
  if (!got.is_floating_point() || error == 0) return error;
  const double scale = std::max(largest(want), least);
  return error / (scale > 0 ? scale : others);
}

}  // namespace

at::Tensor normal(at::IntArrayRef sizes, std::uint64_t seed, double scale) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), at::kDouble) * scale;
}

at::Tensor whole_numbers(const std::vector<std::int32_t>& values) {
  at::Tensor out = at::empty({static_cast<std::int64_t>(values.size())}, at::kInt);
  for (std::size_t i = 0; i < values.size(); ++i) out[static_cast<std::int64_t>(i)] = values[i];
  return out;
}

std::vector<OperationCase> all_operation_cases() {
  std::vector<OperationCase> all;
  for (auto* const cases : {row_cases, moving_cases, product_cases, attention_cases, head_cases, expert_cases,
                            optimizer_cases, state_cases, variant_cases})
    for (OperationCase& each : cases()) all.push_back(std::move(each));
  return all;
}

std::vector<at::Tensor> results_on(Device& device, const OperationCase& each, DType dtype) {
  return run_on(device, each, arguments_of(each, scalar_type(dtype)));
}

std::vector<at::Tensor> answer_of_cpu(const OperationCase& each, DType dtype) {
  std::vector<at::Tensor> exact;
  for (const at::Tensor& argument : arguments_of(each, scalar_type(dtype)))
    exact.push_back(argument.defined() ? widened(argument) : argument);
  return run_on(cpu_device(), each, exact);
}

OperationCheck compared(const OperationCase& each, DType dtype, const std::vector<at::Tensor>& results,
                        const std::vector<at::Tensor>& answer) {
  const at::ScalarType scalar = scalar_type(dtype);
  const double allowed = each.roundings * roundoff(scalar) + each.terms * roundoff(accumulator_type(scalar));
  OperationCheck check{each.operation, each.sizes, dtype, 0, allowed, true};
  double largest_answer = 0;
  for (const at::Tensor& value : answer)
    if (value.is_floating_point()) largest_answer = std::max(largest_answer, largest(value));
  std::vector<double> least;
  for (const OperationCase::Argument& argument : each.arguments)
    if (argument.result) least.push_back(argument.least);
  for (std::size_t i = 0; i < results.size() && !std::isnan(check.error); ++i) {
    const double error = difference(results[i], answer[i], least[i], largest_answer);
    if (!(error <= check.error)) check.error = error;
  }
  return check;
}

bool same_bits(const std::vector<at::Tensor>& results, const std::vector<at::Tensor>& others) {
  return std::equal(
      results.begin(), results.end(), others.begin(), others.end(), [](const at::Tensor& a, const at::Tensor& b) {
        return a.equal(b) || (a.scalar_type() == at::kDouble && a.view(at::kLong).equal(b.view(at::kLong)));
      });
}

OperationCheck check_operation(Device& device, const OperationCase& each, DType dtype) {
  const std::vector<at::Tensor> results = results_on(device, each, dtype);
  OperationCheck check = compared(each, dtype, results, answer_of_cpu(each, dtype));
  check.same_bits = same_bits(results, results_on(device, each, dtype));
  return check;
}

}  // namespace espalier
