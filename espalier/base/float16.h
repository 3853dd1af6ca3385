// IEEE binary16, for files only: arithmetic happens in float. Written out, because Clang 14 has no _Float16 on x86-64.
#pragma once

#include <bit>
#include <cstdint>

namespace espalier {

// Every value is a float: subnormals are multiples of 2^-24.
struct float16 {
  std::uint16_t bits = 0;

  float16() = default;
  explicit float16(float value) {  // to nearest, ties to even; NaN stays NaN, and from 65,520 on it is infinity
    const auto raw = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = (raw >> 16) & 0x8000u, magnitude = raw & 0x7fffffffu;
    std::uint32_t rounded = 0x7c00u;
    if (magnitude > 0x7f800000u)
      rounded |= 0x200u | ((magnitude >> 13) & 0x3ffu);
    else if (magnitude < 0x38800000u)  // below 2^-14; the last bit of numbers in [1/2, 1) is 2^-24
      rounded = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    else if (magnitude < 0x477ff000u)
      rounded = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    bits = static_cast<std::uint16_t>(sign | rounded);
  }
  explicit operator float() const {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
    const std::uint32_t exponent = (bits >> 10) & 0x1fu, fraction = bits & 0x3ffu;
    if (exponent == 0) {
      const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
      return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | sign);
    }
    const std::uint32_t wide = exponent == 31 ? 255u : exponent + 112u;
    return std::bit_cast<float>(sign | wide << 23 | fraction << 13);
  }
  explicit operator double() const { return static_cast<double>(static_cast<float>(*this)); }
};

}  // namespace espalier
