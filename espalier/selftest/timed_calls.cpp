#include "espalier/selftest/timed_calls.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "espalier/device/scalar_type.h"
#include "espalier/selftest/operation_check.h"

namespace espalier {
namespace {

constexpr std::int64_t kDrawn = 1 << 18;
constexpr double kWarmUp = 50e-3, kSteady = 50e-3;  // seconds of calls on a GPU
constexpr double kMostCalls = 500;

// Seconds of `calls` calls that follow each other.
double seconds_of_all(Device& device, const TimedCall& work, double calls) {
  const Device::Moment begin = device.moment();
  for (double call = 0; call < calls; ++call) work.call();
  return device.seconds_between(begin, device.moment());
}

}  // namespace

TimedRoom::TimedRoom(Device& device, DType dtype) : device_(device), dtype_(scalar_type(dtype)) {}
at::Tensor TimedRoom::values(at::IntArrayRef sizes) const { return filled(sizes, dtype_, normal({kDrawn}, 1)); }
at::Tensor TimedRoom::sums(at::IntArrayRef sizes) const { return positive(sizes, accumulator_type(dtype_)); }
at::Tensor TimedRoom::numbers(at::IntArrayRef sizes) const { return positive(sizes, at::kDouble); }
at::Tensor TimedRoom::places(std::int64_t count, std::int64_t step, std::int64_t first) const {
  return whole(at::arange(count, at::kLong) * step + first);
}
at::Tensor TimedRoom::whole(const at::Tensor& numbers) const { return device_.adopt(numbers.to(at::kInt)); }
at::Tensor TimedRoom::all(std::int64_t count, std::int64_t value) const {
  return device_.adopt(at::full({count}, value, at::kInt));
}
double TimedRoom::size() const { return static_cast<double>(c10::elementSize(dtype_)); }

at::Tensor TimedRoom::positive(at::IntArrayRef sizes, at::ScalarType dtype) const {
  return filled(sizes, dtype, normal({kDrawn}, 2).abs() + 0.5);
}
at::Tensor TimedRoom::filled(at::IntArrayRef sizes, at::ScalarType dtype, const at::Tensor& drawn) const {
  const at::Tensor tensor = device_.allocate(sizes, dtype), flat = tensor.view({-1}), numbers = drawn.to(dtype);
  for (std::int64_t begin = 0; begin < flat.numel(); begin += kDrawn) {
    const std::int64_t count = std::min(kDrawn, flat.numel() - begin);
    device_.to_device(numbers.narrow(0, 0, count), flat.narrow(0, begin, count));
  }
  return tensor;
}

double seconds_of(Device& device, const TimedCall& work, int runs) {
  double least = std::numeric_limits<double>::infinity();
  for (int run = 0; run <= runs; ++run) {
    const double seconds = seconds_of_all(device, work, 1);
    if (run > 0) least = std::min(least, seconds);
  }
  return std::max(least, 1e-9);
}

double steady_seconds_of(Device& device, const TimedCall& work, int runs) {
  const double least = seconds_of(device, work, runs);
  if (device.in_host_memory() || least >= kWarmUp) return least;
  const auto calls = [&](double seconds) { return std::clamp(std::ceil(seconds / least), 1.0, kMostCalls); };
  (void)seconds_of_all(device, work, calls(kWarmUp));
  const double timed = calls(kSteady);
  return std::max(seconds_of_all(device, work, timed) / timed, 1e-9);
}

}  // namespace espalier
