// Number formats, by name and as types. bfloat16 is storage only: arithmetic happens in float.
#pragma once

#include <bit>
#include <cstdint>
#include <string>

namespace espalier {

enum class DType { float64, float32, bfloat16 };
std::int64_t bytes_of(DType dtype);
const char* name_of(DType dtype);
DType parse_dtype(const std::string& name);  // OptionError for anything else

struct bfloat16 {
  std::uint16_t bits = 0;

  bfloat16() = default;
  explicit bfloat16(float value) {  // to nearest, ties to even; NaN stays NaN
    const auto raw = std::bit_cast<std::uint32_t>(value);
    bits = (raw & 0x7fffffffu) > 0x7f800000u ? static_cast<std::uint16_t>((raw >> 16) | 0x40u)
                                             : static_cast<std::uint16_t>((raw + 0x7fffu + ((raw >> 16) & 1u)) >> 16);
  }
  explicit operator float() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
  explicit operator double() const { return static_cast<double>(static_cast<float>(*this)); }
};

// The type sums are kept in: float for float and bfloat16, double for double.
template <class T>
struct accumulator {
  using type = float;
};
template <>
struct accumulator<double> {
  using type = double;
};
template <class T>
using accumulator_t = typename accumulator<T>::type;

}  // namespace espalier
