// SwiGLU forward and backward, in place and not; biases and their gradient.
#include "tests/unit/ops/row_kernels/row_cases.h"

namespace espalier {
namespace {

template <class N>
N sigmoid(N x) {
  return N(1) / (N(1) + std::exp(-x));
}

template <class T, class N>
std::vector<N> plain_swiglu(Size size, const std::vector<N>& gate_up, std::vector<N> act) {
  for (std::int64_t r = 0; r < size.rows; ++r) {
    for (std::int64_t f = 0; f < size.width; ++f) {
      const N gate = gate_up[static_cast<std::size_t>(r * 2 * size.width + f)];
      const N up = gate_up[static_cast<std::size_t>((r * 2 + 1) * size.width + f)];
      act[static_cast<std::size_t>(r * size.width + f)] = stored<T>(stored<T>(gate * sigmoid(gate)) * up);
    }
  }
  return act;
}
template <class T, class N>
std::vector<N> plain_swiglu_backward(Size size, const std::vector<N>& gate_up, const std::vector<N>& grad_act) {
  auto grad = gate_up;
  for (std::int64_t r = 0; r < size.rows; ++r) {
    for (std::int64_t f = 0; f < size.width; ++f) {
      const auto at_gate = static_cast<std::size_t>(r * 2 * size.width + f);
      const auto at_up = static_cast<std::size_t>((r * 2 + 1) * size.width + f);
      const N gate = gate_up[at_gate], up = gate_up[at_up], d = grad_act[static_cast<std::size_t>(r * size.width + f)];
      const N s = sigmoid(gate);
      grad[at_gate] = stored<T>(d * up * s * (1 + gate * (1 - s)));
      grad[at_up] = stored<T>(d * stored<T>(gate * s));
    }
  }
  return grad;
}

template <class T>
class SwiGlu : public ::testing::Test {};
using Types = ::testing::Types<float, double, bfloat16>;
TYPED_TEST_SUITE(SwiGlu, Types);

TYPED_TEST(SwiGlu, IsAsAccurateAsAPlainLoop) {
  using T = TypeParam;
  using A = accumulator_t<T>;
  for (Size size : kSizes) {
    SCOPED_TRACE(::testing::Message() << "seed 9, rows " << size.rows << ", inner " << size.width);
    std::mt19937_64 random(9);
    const std::int64_t count = size.rows * size.width;
    const auto gate_up = random_buffer<T>(random, 2 * count, 3), grad_act = random_buffer<T>(random, count);
    const auto plain = plain_swiglu<T>(size, numbers<A>(gate_up), numbers<A>(grad_act));
    const auto exact = plain_swiglu<T>(size, numbers<Exact<T>>(gate_up), numbers<Exact<T>>(grad_act));
    const auto plain_grad = plain_swiglu_backward<T>(size, numbers<A>(gate_up), numbers<A>(grad_act));
    const auto exact_grad = plain_swiglu_backward<T>(size, numbers<Exact<T>>(gate_up), numbers<Exact<T>>(grad_act));
    for_each_set(3, [&] {
      auto act = filled_buffer<T>(count, NAN);
      rows::swiglu<T>({}, size.rows, size.width, gate_up.data(), act.data());
      // The exponential is good to 2 units in the last place (4 roundings); then sum, quotient, product.
      EXPECT_TRUE(as_good_as_plain(act, plain, exact, 7));
      auto grad = filled_buffer<T>(2 * count, NAN);
      rows::swiglu_backward<T>({}, size.rows, size.width, gate_up.data(), grad_act.data(), grad.data(), nullptr);
      EXPECT_TRUE(as_good_as_plain(grad, plain_grad, exact_grad, 12));

      auto act_again = filled_buffer<T>(count, NAN), grad_again = filled_buffer<T>(2 * count, NAN);
      rows::swiglu_backward<T>({}, size.rows, size.width, gate_up.data(), grad_act.data(), grad_again.data(),
                               act_again.data());
      EXPECT_TRUE(same_bits(act_again, act));
      EXPECT_TRUE(same_bits(grad_again, grad));

      auto in_place = gate_up, shared_act = grad_act;  // grad_gate_up is gate_up, act is grad_act
      rows::swiglu_backward<T>({}, size.rows, size.width, in_place.data(), shared_act.data(), in_place.data(),
                               shared_act.data());
      EXPECT_TRUE(same_bits(in_place, grad));
      EXPECT_TRUE(same_bits(shared_act, act));
    });
  }
}

// silu may be off by its error of 8 roundings of a float, which moves its rounded value only across a tie.
TEST(SwiGluBfloat16, RoundsSiluBeforeTheProduct) {
  const Size size{20, 333};
  std::mt19937_64 random(10);
  const auto gate_up = random_buffer<bfloat16>(random, 2 * size.rows * size.width, 3);
  for_each_set(3, [&] {
    auto act = filled_buffer<bfloat16>(size.rows * size.width, NAN);
    rows::swiglu<bfloat16>({}, size.rows, size.width, gate_up.data(), act.data());
    for (std::int64_t r = 0; r < size.rows; ++r) {
      for (std::int64_t f = 0; f < size.width; ++f) {
        const auto gate = number<double>(gate_up[static_cast<std::size_t>(r * 2 * size.width + f)]);
        const auto up = number<float>(gate_up[static_cast<std::size_t>((r * 2 + 1) * size.width + f)]);
        const double silu = gate * sigmoid(gate);
        const float low = eight_bits(eight_bits(static_cast<float>(silu * (1 - 0x1p-21))) * up);
        const float high = eight_bits(eight_bits(static_cast<float>(silu * (1 + 0x1p-21))) * up);
        const auto actual = number<float>(act[static_cast<std::size_t>(r * size.width + f)]);
        ASSERT_TRUE(actual == low || actual == high)
            << "gate " << gate << ", up " << up << ": " << actual << " " << low;
      }
    }
  });
}

TYPED_TEST(SwiGlu, StaysFiniteFarFromZero) {
  using T = TypeParam;
  const std::vector<double> gates = {-1e4, -800, -200, -89, 89, 200, 800, 1e4};
  for_each_set(3, [&] {
    for (double gate : gates) {
      std::vector<T> gate_up = {of<T>(gate), of<T>(2)}, grad_act = {of<T>(1)}, act(1);
      const double exact = gate < 0 ? 0 : number<double>(gate_up[0]);
      rows::swiglu_backward<T>({}, 1, 1, gate_up.data(), grad_act.data(), gate_up.data(), act.data());
      EXPECT_NEAR(number<double>(act[0]), 2 * exact, 1e-35) << gate;
      EXPECT_NEAR(number<double>(gate_up[0]), gate < 0 ? 0 : 2, 1e-35) << gate;
      EXPECT_NEAR(number<double>(gate_up[1]), exact, 1e-35) << gate;
    }
  });
}

TEST(SwiGluGradient, IsTheDerivativeOfTheForward) {
  const Size size{3, 11};
  std::mt19937_64 random(11);
  auto gate_up = random_buffer<double>(random, 2 * size.rows * size.width);
  const auto c = random_buffer<double>(random, size.rows * size.width);
  auto act = c;
  const auto loss = [&] {
    rows::swiglu<double>({}, size.rows, size.width, gate_up.data(), act.data());
    double sum = 0;
    for (std::size_t i = 0; i < c.size() - kGuard; ++i) sum += c[i] * act[i];
    return sum;
  };
  auto grad = gate_up;
  rows::swiglu_backward<double>({}, size.rows, size.width, gate_up.data(), c.data(), grad.data(), nullptr);
  // |loss| of about 10, rounded 40 times, over h = 1e-3.
  for (std::size_t i = 0; i < gate_up.size() - kGuard; ++i) EXPECT_NEAR(grad[i], derivative(&gate_up[i], loss), 4e-11);
}

template <class T>
class Bias : public ::testing::Test {};
TYPED_TEST_SUITE(Bias, Types);

TYPED_TEST(Bias, IsAddedWithOneRounding) {
  using T = TypeParam;
  using A = accumulator_t<T>;
  for (Size size : kSizes) {
    std::mt19937_64 random(12);
    const auto before = random_buffer<T>(random, size.rows * size.width), bias = random_buffer<T>(random, size.width);
    auto expected = numbers<A>(before);
    for (std::int64_t i = 0; i < size.rows * size.width; ++i)
      expected[static_cast<std::size_t>(i)] =
          stored<T>(expected[static_cast<std::size_t>(i)] + number<A>(bias[static_cast<std::size_t>(i % size.width)]));
    for_each_set(3, [&] {
      auto y = before;
      rows::add_bias<T>(size.rows, size.width, bias.data(), y.data());
      EXPECT_EQ(numbers<A>(y), expected);
    });
  }
}

TYPED_TEST(Bias, GradientAddsTheColumnSums) {
  using T = TypeParam;
  using A = accumulator_t<T>;
  for (Size size : kSizes) {
    for (std::int64_t gap : {0, 3}) {
      SCOPED_TRACE(::testing::Message() << "seed 13, rows " << size.rows << ", width " << size.width);
      std::mt19937_64 random(13);
      const std::int64_t stride = size.width + gap;
      const auto grad_y = random_buffer<T>(random, size.rows * stride);
      const auto before = random_buffer<A>(random, size.width);
      const auto run = [&]<class N>(N) {
        auto sums = numbers<N>(before);
        for (std::int64_t r = 0; r < size.rows; ++r)
          for (std::int64_t m = 0; m < size.width; ++m)
            sums[static_cast<std::size_t>(m)] += number<N>(grad_y[static_cast<std::size_t>(r * stride + m)]);
        return sums;
      };
      for_each_set(3, [&] {
        auto sums = before, again = before;
        rows::add_column_sums<T>(size.rows, size.width, grad_y.data(), stride, sums.data());
        EXPECT_TRUE(as_good_as_plain(sums, run(A{}), run(Exact<T>{}), 1));
        omp_set_num_threads(1);  // any number gives the same bits
        rows::add_column_sums<T>(size.rows, size.width, grad_y.data(), stride, again.data());
        EXPECT_TRUE(same_bits(again, sums));
        omp_set_num_threads(3);
      });
    }
  }
}

}  // namespace
}  // namespace espalier
