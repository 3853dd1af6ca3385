#include "espalier/config/stored_values.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "espalier/base/float16.h"

namespace espalier {
namespace {

template <class T>
T number_at(const char* bytes) {
  T out;
  std::memcpy(&out, bytes, sizeof out);
  return out;
}

std::size_t bytes_of(std::string_view dtype) {
  if (dtype == "F64") return 8;
  if (dtype == "F32") return 4;
  return dtype == "F16" || dtype == "BF16" ? 2 : 0;
}

std::size_t count_of(const StoredTensor& tensor) {
  std::size_t count = 1;
  for (const std::int64_t size : tensor.shape) count *= static_cast<std::size_t>(std::max<std::int64_t>(size, 0));
  const std::size_t each = bytes_of(tensor.dtype);
  return each > 0 && tensor.end - tensor.begin == count * each ? count : 0;
}

}  // namespace

StoredValues::StoredValues(const StoredTensor& tensor)
    : file_(tensor.file, std::ios::binary),
      each_(bytes_of(tensor.dtype)),
      count_(count_of(tensor)),
      dtype_(tensor.dtype) {
  file_.seekg(static_cast<std::streamoff>(tensor.begin));
}

bool StoredValues::read(std::size_t count) {
  bytes_.resize(count * each_);
  return static_cast<bool>(file_.read(bytes_.data(), static_cast<std::streamsize>(bytes_.size())));
}

double StoredValues::operator[](std::size_t i) const {
  const char* const bytes = bytes_.data() + i * each_;
  if (dtype_ == "F64") return number_at<double>(bytes);
  if (dtype_ == "F32") return static_cast<double>(number_at<float>(bytes));
  const auto bits = number_at<std::uint16_t>(bytes);
  if (dtype_ == "BF16") return static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16));
  float16 half;
  half.bits = bits;
  return static_cast<double>(half);
}

}  // namespace espalier
