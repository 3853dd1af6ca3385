// Calls of operations that are timed, and tensors for them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "espalier/base/dtype.h"
#include "espalier/device/device.h"
#include "espalier/ops/operations.h"

namespace espalier {

// Tensors of a device. Their numbers are drawn: a GPU multiplies zeros faster than what a model has.
class TimedRoom {
 public:
  TimedRoom(Device& device, DType dtype);
  at::Tensor values(at::IntArrayRef sizes) const;   // in the dtype
  at::Tensor sums(at::IntArrayRef sizes) const;     // positive, in its accumulator dtype
  at::Tensor numbers(at::IntArrayRef sizes) const;  // positive, in float64
  at::Tensor places(std::int64_t count, std::int64_t step, std::int64_t first = 0) const;
  at::Tensor whole(const at::Tensor& numbers) const;  // int32
  at::Tensor all(std::int64_t count, std::int64_t value) const;
  double size() const;  // bytes of a value
  Device& device() const { return device_; }
  const Operations& ops() const { return device_.operations(); }

 private:
  at::Tensor positive(at::IntArrayRef sizes, at::ScalarType dtype) const;
  at::Tensor filled(at::IntArrayRef sizes, at::ScalarType dtype, const at::Tensor& drawn) const;

  Device& device_;
  at::ScalarType dtype_;
};

struct TimedCall {
  std::function<void()> call;
  double bytes = 0, flops = 0;
};

// Seconds of one call: the least of `runs`, after one to warm up.
double seconds_of(Device& device, const TimedCall& work, int runs);

// Seconds of one call as in a step. A GPU raises its clocks in tens of milliseconds, and a call that stands alone shows
// the host's part: the mean of calls that follow each other counts, after calls to warm up. On a CPU: the least of
// `runs`.
double steady_seconds_of(Device& device, const TimedCall& work, int runs);

}  // namespace espalier
