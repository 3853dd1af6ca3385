// float16 against its definition: every number of the format comes back, and what lies between two goes to the nearer
// one.
#include "espalier/base/float16.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace espalier {
namespace {

float16 of_bits(int bits) {
  float16 number;
  number.bits = static_cast<std::uint16_t>(bits);
  return number;
}
int rounded(float value) { return float16(value).bits; }

TEST(Float16, EveryNumberComesBack) {
  for (int bits = 0; bits < 0x10000; ++bits) {
    const auto value = static_cast<float>(of_bits(bits));
    if (std::isnan(value))
      EXPECT_TRUE(std::isnan(static_cast<float>(float16(value)))) << bits;
    else
      ASSERT_EQ(rounded(value), bits);
  }
}

TEST(Float16, NumbersBetweenTwoGoToTheNearerAndFromTheMiddleToTheEven) {
  constexpr float kFar = std::numeric_limits<float>::infinity();
  for (int bits = 0; bits < 0x7bff; ++bits) {
    const auto low = static_cast<float>(of_bits(bits)), high = static_cast<float>(of_bits(bits + 1));
    const float middle = low + (high - low) / 2;  // exact
    ASSERT_EQ(rounded(middle), bits + bits % 2);
    ASSERT_EQ(rounded(std::nextafter(middle, -kFar)), bits);
    ASSERT_EQ(rounded(std::nextafter(middle, kFar)), bits + 1);
    ASSERT_EQ(rounded(-middle), (bits + bits % 2) | 0x8000);
  }
}

TEST(Float16, NumbersFrom65520OnAreInfinite) {
  EXPECT_EQ(rounded(std::nextafter(65520.0f, 0.0f)), 0x7bff);
  EXPECT_EQ(rounded(65520.0f), 0x7c00);
  EXPECT_EQ(rounded(-std::numeric_limits<float>::infinity()), 0xfc00);
}

}  // namespace
}  // namespace espalier
