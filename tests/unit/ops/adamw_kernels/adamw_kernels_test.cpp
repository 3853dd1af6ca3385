// AdamW and the squared norm against plain loops.
#include "espalier/ops/cpu/adamw_kernels.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <random>
#include <vector>

#include "espalier/base/instruction_set.h"
#include "tests/support/instruction_sets.h"

namespace espalier {
namespace {

using testing::for_each_set;

constexpr std::int64_t kCounts[] = {0, 1, 7, 64, 65, 1000, 16384, 70001};
constexpr std::int64_t kSteps = 10;

template <class T>
struct State {
  std::vector<T> p, m, v;
};

// |g| in [0.5, 2): see the bounds below.
template <class T>
std::vector<T> gradient(std::int64_t count, std::int64_t step) {
  std::mt19937_64 random(static_cast<std::uint64_t>(100 + step));
  std::uniform_real_distribution<double> size(0.5, 2);
  std::vector<T> g;
  for (std::int64_t i = 0; i < count; ++i) {
    const double value = size(random);
    g.push_back(static_cast<T>(static_cast<float>(random() % 2 == 0 ? value : -value)));
  }
  return g;
}
template <class T>
State<T> start(std::int64_t count) {
  std::mt19937_64 random(99);
  std::uniform_real_distribution<double> uniform(-1, 1);
  State<T> state{{}, std::vector<T>(static_cast<std::size_t>(count)), std::vector<T>(static_cast<std::size_t>(count))};
  for (std::int64_t i = 0; i < count; ++i) state.p.push_back(static_cast<T>(static_cast<float>(uniform(random))));
  return state;
}

AdamWStep options(std::int64_t step) {
  return {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-3, .weight_decay = 0.1, .grad_scale = 0.7, .step = step};
}

// The equations as they stand in the paper.
template <class T>
State<T> plain_steps(std::int64_t count) {
  State<T> s = start<T>(count);
  for (std::int64_t t = 1; t <= kSteps; ++t) {
    const AdamWStep o = options(t);
    const auto grad = gradient<T>(count, t);
    const T correction1 = 1 - std::pow(T(o.beta1), T(t)), correction2 = 1 - std::pow(T(o.beta2), T(t));
    for (std::size_t i = 0; i < grad.size(); ++i) {
      const T g = grad[i] * T(o.grad_scale);
      s.m[i] = T(o.beta1) * s.m[i] + (1 - T(o.beta1)) * g;
      s.v[i] = T(o.beta2) * s.v[i] + (1 - T(o.beta2)) * g * g;
      const T m_hat = s.m[i] / correction1, v_hat = s.v[i] / correction2;
      s.p[i] = s.p[i] - T(o.lr) * T(o.weight_decay) * s.p[i] - T(o.lr) * m_hat / (std::sqrt(v_hat) + T(o.eps));
    }
  }
  return s;
}

template <class T>
State<T> kernel_steps(std::int64_t count, std::vector<bfloat16>* rounded) {
  State<T> s = start<T>(count);
  for (std::int64_t t = 1; t <= kSteps; ++t) {
    const auto grad = gradient<T>(count, t);
    adamw<T>(count, s.p.data(), grad.data(), s.m.data(), s.v.data(), options(t),
             rounded == nullptr ? nullptr : rounded->data());
  }
  return s;
}

template <class T>
double worst(const std::vector<T>& a, const std::vector<double>& b) {
  double most = 0;
  for (std::size_t i = 0; i < b.size(); ++i) most = std::max(most, std::abs(static_cast<double>(a[i]) - b[i]));
  return most;
}

// With roundoff u, |scaled g| in [0.35, 1.4], so m, sqrt(v) <= 1.4 and sqrt(v_hat) >= 0.35:
//   m: three roundings a step of at most 1.4, and factors of the step rounded twice: 10 * 5 * 1.4 u = 70 u
//   v: sums of positive terms, so relative: five roundings a step, 50 u, of values up to 2: 100 u
//   one step of p: three roundings of |p| (up to 1.1), plus lr times the error of m_hat / (sqrt(v_hat) + eps): that of
//   m over 1 - beta1^t, where after t steps both the error (7 t u) and 1 - beta1^t (above 0.06 t) grow with t: 120 u
//   over sqrt(v_hat); that of sqrt(v_hat): half of 50 u, and two of its own, times |m_hat| / sqrt(v_hat) <= 4; a dozen
//   roundings of the quotient: 50 u.
template <class T>
void expect_within_bounds(std::int64_t count, double u) {
  const State<double> exact = plain_steps<double>(count);
  for_each_set(3, [&] {
    const State<T> actual = kernel_steps<T>(count, nullptr);
    EXPECT_LE(worst(actual.m, exact.m), 70 * u);
    EXPECT_LE(worst(actual.v, exact.v), 100 * u);
    EXPECT_LE(worst(actual.p, exact.p), 10 * (3 * 1.1 + 1e-3 * (120 / 0.35 + 27 * 4 + 50)) * u);
  });
}

TEST(AdamW, FollowsTheEquationsForTenSteps) {
  for (std::int64_t count : kCounts) {
    SCOPED_TRACE(count);
    expect_within_bounds<float>(count, 0x1p-24);
    expect_within_bounds<double>(count, 2 * 0x1p-53);  // the plain loop rounds as well
  }
}

// torch.optim.AdamW, one tensor operation after the other, each rounded to float:
//   p.mul_(1 - lr wd); m.lerp_(g, 1 - b1); v.mul_(b2).addcmul_(g, g, 1 - b2);
//   denom = (v.sqrt() / sqrt(1 - b2^t)).add_(eps); p.addcdiv_(m, denom, -lr/(1 - b1^t))
// lerp_ and addcmul_ end in a multiply-add, fused where the processor can. Volatile: nothing else is fused.
State<float> torch_step(State<float> s, const std::vector<float>& grad, const AdamWStep& o, bool fuse) {
  const double t = static_cast<double>(o.step);
  const auto multiply_add = [&](float a, float b, float c) {
    volatile float product = a * b;
    return fuse ? std::fma(a, b, c) : product + c;
  };
  const auto weight = static_cast<float>(1 - o.beta1);
  for (std::size_t i = 0; i < grad.size(); ++i) {
    volatile float g = grad[i] * static_cast<float>(o.grad_scale);
    volatile float p = s.p[i] * static_cast<float>(1 - o.lr * o.weight_decay);
    volatile float difference = g - s.m[i];
    s.m[i] = weight < 0.5f ? multiply_add(weight, difference, s.m[i]) : multiply_add(weight - 1, difference, g);
    volatile float kept = s.v[i] * static_cast<float>(o.beta2);
    volatile float part = static_cast<float>(1 - o.beta2) * g;
    s.v[i] = multiply_add(part, g, kept);
    volatile float root = std::sqrt(s.v[i]);
    volatile float corrected = root / static_cast<float>(std::sqrt(1 - std::pow(o.beta2, t)));
    volatile float denominator = corrected + static_cast<float>(o.eps);
    volatile float numerator = static_cast<float>(-(o.lr / (1 - std::pow(o.beta1, t)))) * s.m[i];
    volatile float quotient = numerator / denominator;
    s.p[i] = p + quotient;
  }
  return s;
}

TEST(AdamW, RoundsEachOperationInTheOrderOfTorch) {
  const std::int64_t count = 70001;
  for (double beta1 : {0.9, 0.3}) {  // lerp starts from the nearer end
    State<float> initial = start<float>(count);
    initial.m = gradient<float>(count, 2);
    initial.v = gradient<float>(count, 3);
    for (float& value : initial.v) value = std::abs(value);
    const auto grad = gradient<float>(count, 1);
    AdamWStep o = options(7);
    o.beta1 = beta1;
    const State<float> fused = torch_step(initial, grad, o, true), apart = torch_step(initial, grad, o, false);
    EXPECT_NE(fused.m, apart.m);
    for (int threads : {1, 3}) {
      for_each_set(threads, [&] {
        State<float> s = initial;
        adamw<float>(count, s.p.data(), grad.data(), s.m.data(), s.v.data(), o, nullptr);
        const State<float>& expected = instruction_set() == InstructionSet::baseline ? apart : fused;
        EXPECT_EQ(s.p, expected.p);
        EXPECT_EQ(s.m, expected.m);
        EXPECT_EQ(s.v, expected.v);
      });
    }
  }
}

TEST(AdamW, WritesTheRoundedMasterInTheSamePass) {
  for (std::int64_t count : kCounts) {
    for_each_set(2, [&] {
      std::vector<bfloat16> rounded(static_cast<std::size_t>(count) + 3, bfloat16(77.0f));
      const State<float> s = kernel_steps<float>(count, &rounded);
      EXPECT_EQ(s.p, kernel_steps<float>(count, nullptr).p);
      for (std::size_t i = 0; i < s.p.size(); ++i) {
        int exponent = 0;
        const float mantissa = std::frexp(s.p[i], &exponent);
        ASSERT_EQ(static_cast<float>(rounded[i]), std::ldexp(std::nearbyint(std::ldexp(mantissa, 8)), exponent - 8));
      }
      for (std::size_t i = s.p.size(); i < rounded.size(); ++i) ASSERT_EQ(static_cast<float>(rounded[i]), 77.0f);
    });
  }
}

TEST(AdamW, WithoutGradientOnlyDecays) {
  State<float> s = start<float>(100);
  const auto before = s.p;
  const std::vector<float> grad(100);
  adamw<float>(100, s.p.data(), grad.data(), s.m.data(), s.v.data(), options(1), nullptr);
  for (std::size_t i = 0; i < before.size(); ++i) EXPECT_EQ(s.p[i], before[i] * static_cast<float>(1 - 1e-3 * 0.1));
}

template <class T>
void check_sum_of_squares() {
  for (std::int64_t count : kCounts) {
    const auto x = gradient<T>(count, 5);
    long double exact = 0;
    for (T value : x) exact += static_cast<long double>(value) * static_cast<long double>(value);
    std::vector<double> results;
    for (int threads : {1, 2, 3}) for_each_set(threads, [&] { results.push_back(sum_of_squares<T>(count, x.data())); });
    for (double result : results) {
      EXPECT_EQ(result, results.front());
      // No term passes more than 1024 additions in its lane, 4 folds and the blocks (at most 5 here).
      EXPECT_NEAR(result, static_cast<double>(exact), 1035 * 0x1p-53 * static_cast<double>(exact));
    }
  }
}

TEST(SumOfSquares, IsTheSameForAnyThreadsAndInstructionSet) {
  check_sum_of_squares<float>();
  check_sum_of_squares<double>();
}

}  // namespace
}  // namespace espalier
