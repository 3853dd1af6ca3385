// base/simd.h against the C library in higher precision, for every instruction set that this CPU has.
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "espalier/base/instruction_set.h"
#include "tests/unit/base/simd_under_test.h"

namespace espalier {
#define ESPALIER_SET_UNDER_TEST(set) \
  namespace set {                    \
  simd_test::Set set_under_test();   \
  }
ESPALIER_EACH_SET(ESPALIER_SET_UNDER_TEST)
#undef ESPALIER_SET_UNDER_TEST
namespace {

using simd_test::Function;

struct Named {
  std::string name;
  simd_test::Set set;
};
std::vector<Named> sets() {
  std::vector<Named> all;
#define ESPALIER_ADD(set) \
  if (processor_has(InstructionSet::set)) all.push_back({#set, set::set_under_test()});
  ESPALIER_EACH_SET(ESPALIER_ADD)
#undef ESPALIER_ADD
  return all;
}

// Distance of `got` from the exact value in units of the last place of T at that value.
template <class T>
double ulps(T got, long double exact) {
  const T nearest = static_cast<T>(exact);
  if (std::isinf(nearest) || nearest == 0) return got == nearest ? 0 : 1e9;
  const T next = std::nextafter(std::fabs(nearest), std::numeric_limits<T>::infinity());
  const long double unit = static_cast<long double>(next) - std::fabs(static_cast<long double>(nearest));
  return static_cast<double>(std::fabs(static_cast<long double>(got) - exact) / unit);
}

template <class T>
std::vector<T> mapped(const Named& s, Function f, const std::vector<T>& x) {
  std::vector<T> y(x.size() + 1, T(-7));
  if constexpr (sizeof(T) == 4)
    s.set.map_float(f, x.data(), y.data(), static_cast<std::int64_t>(x.size()));
  else
    s.set.map_double(f, x.data(), y.data(), static_cast<std::int64_t>(x.size()));
  EXPECT_EQ(y.back(), T(-7)) << s.name << " wrote behind the last value";
  y.pop_back();
  return y;
}

template <class T, class F>
void expect_accurate(Function f, const std::vector<T>& x, F exact, double limit, const char* what) {
  for (const Named& s : sets()) {
    const std::vector<T> y = mapped(s, f, x);
    double worst = 0;
    T where = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double e = ulps(y[i], exact(static_cast<long double>(x[i])));
      if (!(e <= worst)) worst = e, where = x[i];
    }
    EXPECT_LE(worst, limit) << s.name << " " << what << " of " << where;
  }
}

template <class T>
std::vector<T> spread(double low, double high, std::uint64_t seed, int n = 100003) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> uniform(low, high);
  std::vector<T> x(n);
  for (T& v : x) v = static_cast<T>(uniform(random));
  return x;
}

template <class T>
class SimdOf : public testing::Test {};
using Numbers = testing::Types<float, double>;
TYPED_TEST_SUITE(SimdOf, Numbers);

TYPED_TEST(SimdOf, ExponentialsAreWithinTwoUnits) {
  using T = TypeParam;
  const double top = sizeof(T) == 4 ? 88.7 : 709.7, bottom = sizeof(T) == 4 ? -104.0 : -745.2;
  const auto exp = [](long double v) { return std::exp(v); };
  const auto exp2 = [](long double v) { return std::exp2(v); };
  // Two roundings of half a unit after the polynomial's (one more in the set without fused products), then the scaling.
  expect_accurate(Function::exp, spread<T>(-1, 1, 1), exp, 2.0, "exp");
  expect_accurate(Function::exp, spread<T>(bottom, top, 2), exp, 2.0, "exp");
  expect_accurate(Function::exp2, spread<T>(bottom * 1.4426, top * 1.4426, 3), exp2, 2.0, "exp2");
  const double normal = sizeof(T) == 4 ? -126 : -1022;
  for (const double x : {-1.0, -10.0, normal * 0.693}) {
    const double limit = 2 + 3 * std::fabs(x);  // that of the set without fused products
    expect_accurate(Function::exp_nonpositive, spread<T>(x, 1, 4), exp, limit, "exp_nonpositive");
    expect_accurate(Function::exp_by_powers, spread<T>(x, 0, 5), exp, 2.0, "exp_by_powers");
  }
}

TYPED_TEST(SimdOf, ExponentialsKnowTheEnds) {
  using T = TypeParam;
  const T inf = std::numeric_limits<T>::infinity(), lowest = std::numeric_limits<T>::lowest();
  const std::vector<T> x{-inf, lowest, T(-1e4), T(0), T(1e4), inf, std::numeric_limits<T>::quiet_NaN()};
  for (const Named& s : sets()) {
    for (const Function f : {Function::exp, Function::exp2}) {
      const std::vector<T> y = mapped(s, f, x);
      for (int i = 0; i < 3; ++i) EXPECT_EQ(y[i], T(0)) << s.name;
      EXPECT_EQ(y[3], T(1)) << s.name;
      EXPECT_EQ(y[4], inf) << s.name;
      EXPECT_EQ(y[5], inf) << s.name;
      EXPECT_TRUE(std::isnan(y[6])) << s.name;
    }
    for (const Function f : {Function::exp_nonpositive, Function::exp_by_powers}) {
      const std::vector<T> y = mapped<T>(s, f, {x.begin(), x.begin() + 4});
      for (int i = 0; i < 3; ++i) EXPECT_EQ(y[i], T(0)) << s.name;
      EXPECT_EQ(y[3], T(1)) << s.name;
    }
  }
}

TYPED_TEST(SimdOf, LogarithmIsWithinTwoUnitsAndKnowsTheEnds) {
  using T = TypeParam;
  const auto log = [](long double v) { return std::log(v); };
  expect_accurate(Function::log, spread<T>(0.5, 2, 5), log, 2.0, "log");
  std::vector<T> wide = spread<T>(-140, 127, 6);
  for (T& v : wide) v = std::exp2(v);
  expect_accurate(Function::log, wide, log, 2.0, "log");
  using Limits = std::numeric_limits<T>;
  expect_accurate<T>(Function::log, {Limits::denorm_min(), Limits::max(), T(1)}, log, 2.0, "log");
  for (const Named& s : sets()) {
    const T inf = std::numeric_limits<T>::infinity();
    const std::vector<T> y = mapped<T>(s, Function::log, {T(0), inf, T(-1), T(1)});
    EXPECT_EQ(y[0], -inf);
    EXPECT_EQ(y[1], inf);
    EXPECT_TRUE(std::isnan(y[2]));
    EXPECT_EQ(y[3], T(0));
  }
}

TYPED_TEST(SimdOf, RootAndMagnitudeAreExact) {
  using T = TypeParam;
  const std::vector<T> x = spread<T>(-50, 50, 7, 1003);
  for (const Named& s : sets()) {
    const std::vector<T> magnitude = mapped(s, Function::abs, x), root = mapped(s, Function::sqrt, magnitude);
    for (std::size_t i = 0; i < x.size(); ++i) {
      EXPECT_EQ(magnitude[i], std::fabs(x[i]));
      EXPECT_EQ(root[i], std::sqrt(std::fabs(x[i])));
    }
  }
}

// This file has no flags for fused instructions: what stands here is rounded twice.
TYPED_TEST(SimdOf, ProductsAreFusedWhereTheSourceSaysSoAlone) {
  using T = TypeParam;
  const std::vector<T> x = spread<T>(-2, 2, 9, 1003);
  const T added = static_cast<T>(simd_test::kAdded);
  for (const Named& s : sets()) {
    const std::vector<T> apart = mapped(s, Function::add_square, x);
    int other = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const T square = x[i] * x[i];
      ASSERT_EQ(apart[i], square + added) << s.name << " " << x[i];
      other += std::fma(x[i], x[i], added) != square + added;
    }
    EXPECT_GT(other, 100) << "numbers that do not tell the two apart";
    for (const Function f : {Function::fma_square, Function::fma_of_lanes}) {
      const std::vector<T> y = mapped(s, f, x);
      for (std::size_t i = 0; i < x.size(); ++i)
        ASSERT_EQ(y[i], s.name == "baseline" ? apart[i] : std::fma(x[i], x[i], added)) << s.name << " " << x[i];
    }
  }
}

TYPED_TEST(SimdOf, PartialLoadsAndStoresTouchOnlyTheirValues) {
  using T = TypeParam;
  for (const Named& s : sets())
    for (int n = 0; n <= 33; ++n) {
      const std::vector<T> x(n, T(-3)), y = mapped(s, Function::abs, x);  // mapped checks the value behind the end
      for (const T v : y) EXPECT_EQ(v, T(3)) << s.name << " " << n;
    }
}

TYPED_TEST(SimdOf, SumAndMaximumMeetEveryLane) {
  using T = TypeParam;
  for (const Named& s : sets()) {
    for (int n = 0; n <= 40; ++n) {
      std::vector<T> x(n);
      for (int i = 0; i < n; ++i) x[i] = T(i + 1);  // small integers: exact in any order
      const T want = T(n * (n + 1) / 2);
      if constexpr (sizeof(T) == 4)
        EXPECT_EQ(s.set.sum_float(x.data(), n), want) << s.name;
      else
        EXPECT_EQ(s.set.sum_double(x.data(), n), want) << s.name;
    }
    const int lanes = s.set.lanes_float * 4 / static_cast<int>(sizeof(T));
    for (int top = 0; top < lanes; ++top) {
      std::vector<T> x(lanes, T(-5));
      x[top] = T(-2);
      if constexpr (sizeof(T) == 4)
        EXPECT_EQ(s.set.max_float(x.data()), T(-2)) << s.name;
      else
        EXPECT_EQ(s.set.max_double(x.data()), T(-2)) << s.name;
    }
  }
}

TEST(Simd, Bfloat16RoundsLikeTheScalarType) {
  std::vector<float> x = spread<float>(-1e3, 1e3, 8, 5003);
  for (const float v : {0.0f, -0.0f, std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                        std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::max(), 1e-40f,
                        1.00390625f /* a tie: to even, down */, 1.01171875f /* a tie: to even, up */})
    x.push_back(v);
  for (const Named& s : sets()) {
    std::vector<bfloat16> narrow(x.size());
    std::vector<float> wide(x.size());
    s.set.narrow(x.data(), narrow.data(), static_cast<std::int64_t>(x.size()));
    s.set.widen(narrow.data(), wide.data(), static_cast<std::int64_t>(x.size()));
    for (std::size_t i = 0; i < x.size(); ++i) {
      EXPECT_EQ(narrow[i].bits, bfloat16(x[i]).bits) << s.name << " " << x[i];
      if (!std::isnan(x[i])) {
        EXPECT_EQ(wide[i], static_cast<float>(narrow[i])) << s.name;
      }
    }
  }
}

}  // namespace
}  // namespace espalier
