#include "espalier/ops/cuda/aten.h"

#include <ATen/ops/from_blob.h>
#include <dlfcn.h>

#include <cstdlib>

#include "espalier/ops/cuda/launch.h"

namespace espalier::cuda {
namespace {

std::int8_t gpu = 0;  // the one of this process

}  // namespace

const std::string& open_aten(int index) {
  static const std::string problem = [&] {
    gpu = static_cast<std::int8_t>(index);
    // Waves differ in rows: blocks of fixed size would be of use to none of the next. ATen reads this at its first use.
    if (std::getenv("PYTORCH_CUDA_ALLOC_CONF") == nullptr) setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True", 0);
    const void* const opened = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL);
    return opened == nullptr ? std::string(dlerror()) : std::string();
  }();
  return problem;
}

at::Device aten_device() { return {at::kCUDA, gpu}; }

OnOurStream::OnOurStream()
    : guard_(at::kCUDA),
      before_(guard_.exchangeStream(
          c10::Stream(c10::Stream::UNSAFE, aten_device(), reinterpret_cast<c10::StreamId>(stream())))) {}

at::Tensor seen_by_aten(const at::Tensor& tensor) {
  return at::for_blob(tensor.data_ptr(), tensor.sizes())
      .strides(tensor.strides())
      .target_device(aten_device())
      .options(tensor.options().device(aten_device()))
      .make_tensor();
}

}  // namespace espalier::cuda
