// Number formats against their definitions.
#include "espalier/checkpoint/convert.h"

#include <cmath>
#include <limits>

#include "tests/unit/checkpoint/small_model.h"

namespace espalier::test {
namespace {

// binary16 by its definition, in double.
double half_value(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == 31) return fraction != 0 ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

TEST(Convert, ReadsAllHalves) {
  std::vector<std::uint16_t> halves(65536);
  for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i);
  std::vector<float> floats(halves.size());
  std::vector<double> doubles(halves.size());
  convert_values(TensorType::F16, halves.data(), DType::float32, floats.data(), 65536);
  convert_values(TensorType::F16, halves.data(), DType::float64, doubles.data(), 65536);
  for (std::size_t i = 0; i < halves.size(); ++i) {
    const double expected = half_value(halves[i]);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(floats[i]) && std::isnan(doubles[i])) << i;
    } else {
      ASSERT_EQ(floats[i], expected) << i;
      ASSERT_EQ(doubles[i], expected) << i;
      ASSERT_EQ(std::signbit(floats[i]), std::signbit(expected)) << i;
    }
  }
}

TEST(Convert, WideningAndNarrowingReturnEveryBfloat16) {
  std::vector<std::uint16_t> given(65536), back(65536);
  for (std::size_t i = 0; i < given.size(); ++i) given[i] = static_cast<std::uint16_t>(i);
  for (const DType wide : {DType::float32, DType::float64}) {
    std::vector<std::byte> middle(static_cast<std::size_t>(65536 * bytes_of(wide)));
    convert_values(TensorType::BF16, given.data(), wide, middle.data(), 65536);
    convert_values(tensor_type_of(wide), middle.data(), DType::bfloat16, back.data(), 65536);
    for (std::size_t i = 0; i < given.size(); ++i) {
      if ((i & 0x7fff) > 0x7f80)
        EXPECT_GT(back[i] & 0x7fff, 0x7f80) << i;  // NaN stays NaN
      else
        ASSERT_EQ(back[i], given[i]);
    }
  }
}

TEST(Convert, RoundsToNearestEven) {
  const double doubles[] = {1.0 + 0x1p-24, 1.0 + 3 * 0x1p-24, 1.0 + 0x1p-24 + 0x1p-50, -0.0, 1e300};
  float floats[5];
  convert_values(TensorType::F64, doubles, DType::float32, floats, 5);
  EXPECT_EQ(floats[0], 1.0f);
  EXPECT_EQ(floats[1], 1.0f + 0x1p-22f);
  EXPECT_EQ(floats[2], 1.0f + 0x1p-23f);
  EXPECT_TRUE(std::signbit(floats[3]) && floats[3] == 0.0f);
  EXPECT_TRUE(std::isinf(floats[4]));
  const float ties[] = {1.0f + 0x1p-8f, 1.0f + 3 * 0x1p-8f, 1.0f + 0x1p-8f + 0x1p-20f};
  bfloat16 narrow[3];
  convert_values(TensorType::F32, ties, DType::bfloat16, narrow, 3);
  EXPECT_EQ(static_cast<float>(narrow[0]), 1.0f);
  EXPECT_EQ(static_cast<float>(narrow[1]), 1.0f + 0x1p-6f);
  EXPECT_EQ(static_cast<float>(narrow[2]), 1.0f + 0x1p-7f);
}

TEST(Convert, WorksOnUnalignedAddressesAndManyPieces) {
  constexpr std::int64_t kCount = (std::int64_t{1} << 18) * 2 + 77;  // three pieces
  const std::vector<std::byte> bits = random_bytes(static_cast<std::size_t>(kCount * 2 + 1), 5);
  std::vector<std::byte> out(static_cast<std::size_t>(kCount * 4 + 1));
  convert_values(TensorType::BF16, bits.data() + 1, DType::float32, out.data() + 1, kCount);
  for (std::int64_t i = 0; i < kCount; ++i) {
    std::uint16_t narrow;
    std::uint32_t wide;
    std::memcpy(&narrow, bits.data() + 1 + 2 * i, 2);
    std::memcpy(&wide, out.data() + 1 + 4 * i, 4);
    ASSERT_EQ(wide >> 16, narrow) << i;  // quiet and signalling NaN alike: a shift, no arithmetic
  }
}

TEST(Convert, RefusesWholeNumbers) {
  std::int32_t value = 1;
  float result;
  EXPECT_FALSE(is_floating(TensorType::I32));
  EXPECT_THROW(convert_values(TensorType::I32, &value, DType::float32, &result, 1), InternalError);
}

}  // namespace
}  // namespace espalier::test
