#include "espalier/device/control_block.h"

#include <ATen/core/Tensor.h>

#include <cstring>
#include <utility>

namespace espalier {

void ControlBlock::add(std::span<const std::int32_t> values, at::Tensor& tensor) {
  const std::size_t begin = values_.size();
  parts_.push_back({&tensor, at::kInt, static_cast<std::int64_t>(2 * begin), static_cast<std::int64_t>(values.size())});
  values_.reserve(begin + (values.size() + 1) / 2);  // as much as it holds: doubling would make small blocks large
  values_.resize(begin + (values.size() + 1) / 2);
  if (!values.empty()) std::memcpy(values_.data() + begin, values.data(), values.size_bytes());
}

void ControlBlock::add(std::span<const double> values, at::Tensor& tensor) {
  parts_.push_back(
      {&tensor, at::kDouble, static_cast<std::int64_t>(values_.size()), static_cast<std::int64_t>(values.size())});
  values_.reserve(values_.size() + values.size());
  values_.insert(values_.end(), values.begin(), values.end());
}

void ControlBlock::hand_over(Device& device) {
  const at::Tensor doubles = device.upload(std::exchange(values_, {})), integers = doubles.view(at::kInt);
  for (const Part& part : parts_)
    *part.tensor = (part.dtype == at::kInt ? integers : doubles).narrow(0, part.begin, part.count);
  parts_.clear();
}

}  // namespace espalier
