// ATen's operations for CUDA on this run's memory and stream. They are called through ATen's dispatcher, which the
// program links; their kernels are in libtorch_cuda.so, which is opened on first use. Results are in memory of ATen's
// allocator.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <string>

namespace espalier::cuda {

// Opens ATen once, on GPU `index`. Returns the loader's error, or "".
const std::string& open_aten(int index);

// During its lifetime ATen's work goes to the compute stream.
class OnOurStream {
 public:
  OnOurStream();
  ~OnOurStream() { guard_.exchangeStream(before_); }
  OnOurStream(const OnOurStream&) = delete;
  OnOurStream& operator=(const OnOurStream&) = delete;

 private:
  c10::impl::VirtualGuardImpl guard_;
  c10::Stream before_;
};

// ATen's name for the GPU of this process.
at::Device aten_device();
// A view of a device tensor for ATen: the same memory.
at::Tensor seen_by_aten(const at::Tensor& tensor);

}  // namespace espalier::cuda
