#include "espalier/ops/cuda/aten_library.h"

#include <ATen/ATen.h>

#include "espalier/ops/cuda/launch.h"

namespace espalier::cuda {

at::Tensor AtenLibrary::seen(const at::Tensor& tensor) const { return seen_by_aten(tensor); }

std::vector<std::int32_t> AtenLibrary::on_host(const at::Tensor& whole_numbers) const {
  std::vector<std::int32_t> values(static_cast<std::size_t>(whole_numbers.numel()));
  copy_to_host(values.data(), whole_numbers.data_ptr(), values.size() * sizeof(std::int32_t));
  return values;
}

at::Tensor AtenLibrary::on_device(const std::vector<std::int32_t>& whole_numbers) const {
  return at::tensor(whole_numbers, at::kInt).to(aten_device());
}

}  // namespace espalier::cuda
