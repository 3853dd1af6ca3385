// Byte sizes with units and the random numbers of espalier/base.

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/base/random.h"
#include "espalier/base/units.h"

namespace espalier {
namespace {

TEST(Units, BytesAreReadInEveryUsualSpelling) {
  EXPECT_EQ(parse_bytes("123"), 123);
  EXPECT_EQ(parse_bytes("0"), 0);
  EXPECT_EQ(parse_bytes("8GiB"), std::int64_t{8} << 30);
  EXPECT_EQ(parse_bytes("512MB"), 512'000'000);
  EXPECT_EQ(parse_bytes("1.5g"), std::int64_t{3} << 29);
  EXPECT_EQ(parse_bytes(" 2 kib "), 2048);
  EXPECT_EQ(parse_bytes("2kB"), 2000);
  EXPECT_EQ(parse_bytes("7 B"), 7);
  EXPECT_EQ(parse_bytes("0.5TiB"), std::int64_t{1} << 39);
  for (const char* bad : {"", " ", "GiB", "-1", "+1", "nan", "inf", "1e400", "8 elephants", "1 2",
                          "9223372036854775808", "1e10 TiB", "0x10"})
    EXPECT_THROW(parse_bytes(bad, "--memory-budget"), OptionError) << bad;
}

TEST(Units, QuantitiesAreWrittenForPeople) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1536), "1.50 KiB");
  EXPECT_EQ(format_bytes((1 << 20) - 1), "1.00 MiB");
  EXPECT_EQ(format_bytes(std::int64_t{8} << 30), "8.00 GiB");
  EXPECT_EQ(format_count(0), "0");
  EXPECT_EQ(format_count(999), "999");
  EXPECT_EQ(format_count(1234567), "1,234,567");
  EXPECT_EQ(format_count(-123456), "-123,456");
  EXPECT_EQ(format_count(INT64_MIN), "-9,223,372,036,854,775,808");
  EXPECT_EQ(format_seconds(12.34e-6), "12.3 us");
  EXPECT_EQ(format_seconds(4.56e-3), "4.56 ms");
  EXPECT_EQ(format_seconds(7.894), "7.89 s");
  EXPECT_EQ(format_seconds(0.99996), "1 s");
  EXPECT_EQ(format_seconds(723), "12 min 03 s");
  EXPECT_EQ(format_seconds(7500), "2 h 05 min");
  EXPECT_EQ(format_percent(0.1234), "12.3 %");
}

TEST(Random, GivesTheSameNumbersOnEveryMachine) {
  // splitmix64 of a key of zero (seed and stream 0), as published with the algorithm.
  Random zero(0);
  EXPECT_EQ(zero.bits(), 0xe220a8397b1dcdafu);
  EXPECT_EQ(zero.bits(), 0x6e789e6aa1b965f4u);
  EXPECT_EQ(zero.bits(), 0x06c45d188009454fu);
}

TEST(Random, ForksDoNotDependOnWhatWasDrawn) {
  Random a(7), b(7);
  for (int i = 0; i < 10; ++i) a.bits();
  EXPECT_EQ(a.fork(3).bits(), b.fork(3).bits());
  std::set<std::uint64_t> first;
  for (std::uint64_t stream = 0; stream < 1000; ++stream) {
    first.insert(b.fork(stream).bits());
    first.insert(Random(stream + 8).bits());
    first.insert(Random(7, stream + 1).fork(stream).bits());
  }
  EXPECT_EQ(first.size(), 3000u);
}

TEST(Random, ContinuesFromItsSavedPosition) {
  Random random(5);
  for (int i = 0; i < 17; ++i) random.normal();
  Random restored = Random::restored(random.key(), random.drawn());
  for (int i = 0; i < 100; ++i) ASSERT_EQ(random.bits(), restored.bits());
}

TEST(Random, IntegersStayInRangeAndReachBothEnds) {
  Random random(1);
  std::vector<int> counts(7);
  for (int i = 0; i < 7000; ++i) ++counts[static_cast<std::size_t>(random.integer(-3, 3) + 3)];
  // Each count is binomial(7000, 1/7): mean 1000, deviation 29; six deviations.
  for (const int count : counts) EXPECT_NEAR(count, 1000, 6 * 29.3);
  EXPECT_EQ(random.integer(5, 5), 5);
  for (int i = 0; i < 100; ++i) random.integer(INT64_MIN, INT64_MAX);
}

TEST(Random, UniformAndNormalNumbersHaveTheirMoments) {
  Random random(2);
  constexpr int kDraws = 200'000;
  double uniform_sum = 0, sum = 0, square = 0, fourth = 0;
  for (int i = 0; i < kDraws; ++i) {
    const double u = random.uniform();
    ASSERT_TRUE(u >= 0 && u < 1);
    uniform_sum += u;
    const double z = random.normal();
    sum += z;
    square += z * z;
    fourth += z * z * z * z;
  }
  // Six standard errors: of the mean of u 1/sqrt(12 n), of z 1/sqrt(n), of z^2 sqrt(2/n), of z^4 sqrt(96/n).
  const double error = 6 / std::sqrt(static_cast<double>(kDraws));
  EXPECT_NEAR(uniform_sum / kDraws, 0.5, error / std::sqrt(12.0));
  EXPECT_NEAR(sum / kDraws, 0, error);
  EXPECT_NEAR(square / kDraws, 1, error * std::sqrt(2.0));
  EXPECT_NEAR(fourth / kDraws, 3, error * std::sqrt(96.0));
}

TEST(Random, NormalNumbersUseAnAccurateLogarithm) {
  // The polar method with the C library's logarithm: the same up to a few units of the last place.
  Random random(3), again(3);
  for (int i = 0; i < 10'000; ++i) {
    double u = 0, square = 2;
    while (!(square > 0 && square < 1)) {
      u = 2 * again.uniform() - 1;
      const double v = 2 * again.uniform() - 1;
      square = u * u + v * v;
    }
    const double expected = u * std::sqrt(-2 * std::log(square) / square);
    // log near 1 amplifies the last place of `square` (1e-16) by 1/|log|; half of it remains behind the root.
    EXPECT_NEAR(random.normal(), expected, 1e-15 * std::abs(expected) * (1 + 1 / -std::log(square)));
  }
}

}  // namespace
}  // namespace espalier
