// RMSNorm of the residual stream, forward, again and backward.
#include "tests/unit/ops/row_kernels/row_cases.h"

namespace espalier {
namespace {

constexpr double kEps = 1e-6;

template <class N>
struct Normalized {
  std::vector<N> y, rstd;
};

template <class T, class N>
Normalized<N> plain_norm(Size size, const std::vector<N>& stream, const std::vector<N>& weight, double eps = kEps) {
  Normalized<N> out{stream, {}};
  for (std::int64_t r = 0; r < size.rows; ++r) {
    N squares = 0;
    for (std::int64_t m = 0; m < size.width; ++m) {
      const auto at = static_cast<std::size_t>(r * size.width + m);
      squares += stream[at] * stream[at];
    }
    const N rstd = N(1) / std::sqrt(squares / static_cast<N>(size.width) + static_cast<N>(eps));
    out.rstd.push_back(rstd);
    for (std::int64_t m = 0; m < size.width; ++m) {
      const auto at = static_cast<std::size_t>(r * size.width + m);
      out.y[at] = stored<T>(stored<T>(stream[at] * rstd) * weight[static_cast<std::size_t>(m)]);
    }
  }
  out.rstd.resize(out.rstd.size() + kGuard, static_cast<N>(kGuardValue));
  return out;
}

template <class N>
struct NormGradient {
  std::vector<N> stream, weight;
};

template <class T, class N>
NormGradient<N> plain_norm_backward(Size size, const std::vector<N>& stream, const std::vector<N>& weight,
                                    const std::vector<N>& grad_y, NormGradient<N> into) {
  const auto normalized = plain_norm<T>(size, stream, weight);
  for (std::int64_t r = 0; r < size.rows; ++r) {
    const N rstd = normalized.rstd[static_cast<std::size_t>(r)];
    N dot = 0;
    for (std::int64_t m = 0; m < size.width; ++m) {
      const auto at = static_cast<std::size_t>(r * size.width + m);
      dot += grad_y[at] * weight[static_cast<std::size_t>(m)] * stream[at] * rstd;
    }
    for (std::int64_t m = 0; m < size.width; ++m) {
      const auto at = static_cast<std::size_t>(r * size.width + m), column = static_cast<std::size_t>(m);
      const N n = stream[at] * rstd;
      into.stream[at] =
          stored<T>(into.stream[at] + rstd * (grad_y[at] * weight[column] - n * dot / static_cast<N>(size.width)));
      into.weight[column] += grad_y[at] * stored<T>(n);
    }
  }
  return into;
}

template <class T>
class RmsNorm : public ::testing::Test {};
using Types = ::testing::Types<float, double, bfloat16>;
TYPED_TEST_SUITE(RmsNorm, Types);

TYPED_TEST(RmsNorm, ForwardIsAsAccurateAsAPlainLoop) {
  using T = TypeParam;
  using A = accumulator_t<T>;
  for (Size size : kSizes) {
    SCOPED_TRACE(::testing::Message() << "seed 1, rows " << size.rows << ", width " << size.width);
    std::mt19937_64 random(1);
    const std::int64_t count = size.rows * size.width;
    const auto stream = random_buffer<T>(random, count), weight = random_buffer<T>(random, size.width);
    const auto plain = plain_norm<T>(size, numbers<A>(stream), numbers<A>(weight));
    const auto exact = plain_norm<T>(size, numbers<Exact<T>>(stream), numbers<Exact<T>>(weight));
    for_each_set(3, [&] {
      auto y = filled_buffer<T>(count, NAN), again = filled_buffer<T>(count, NAN);
      auto rstd = filled_buffer<A>(size.rows, NAN);
      rows::rms_norm<T>(size.rows, size.width, stream.data(), weight.data(), kEps, y.data(), rstd.data());
      // Square, mean, epsilon, root, inverse, two products.
      EXPECT_TRUE(as_good_as_plain(y, plain.y, exact.y, 7));
      EXPECT_TRUE(as_good_as_plain(rstd, plain.rstd, exact.rstd, 5));
      rows::rms_norm_again<T>(size.rows, size.width, stream.data(), weight.data(), rstd.data(), again.data());
      EXPECT_TRUE(same_bits(again, y));
    });
  }
}

// Small integers: sums of squares are exact in any order, so every rounding is the plain loop's.
TYPED_TEST(RmsNorm, RoundsWhereTransformersRounds) {
  using T = TypeParam;
  using A = accumulator_t<T>;
  for (Size size : {Size{5, 64}, Size{3, 77}, Size{40, 1000}}) {
    std::mt19937_64 random(2);
    auto stream = filled_buffer<T>(size.rows * size.width, 0);
    const auto weight = random_buffer<T>(random, size.width);
    for (std::size_t i = 0; i < stream.size() - kGuard; ++i) stream[i] = of<T>(static_cast<double>(random() % 17) - 8);
    const auto plain = plain_norm<T>(size, numbers<A>(stream), numbers<A>(weight));
    for_each_set(3, [&] {
      auto y = filled_buffer<T>(size.rows * size.width, NAN);
      auto rstd = filled_buffer<A>(size.rows, NAN);
      rows::rms_norm<T>(size.rows, size.width, stream.data(), weight.data(), kEps, y.data(), rstd.data());
      EXPECT_EQ(numbers<A>(rstd), plain.rstd);
      EXPECT_EQ(numbers<A>(y), plain.y);
    });
  }
}

TYPED_TEST(RmsNorm, BackwardAddsAndIsAsAccurateAsAPlainLoop) {
  using T = TypeParam;
  using A = accumulator_t<T>;
  for (Size size : kSizes) {
    SCOPED_TRACE(::testing::Message() << "seed 3, rows " << size.rows << ", width " << size.width);
    std::mt19937_64 random(3);
    const std::int64_t count = size.rows * size.width;
    const auto stream = random_buffer<T>(random, count), weight = random_buffer<T>(random, size.width);
    const auto grad_y = random_buffer<T>(random, count), before = random_buffer<T>(random, count);
    const auto weight_before = random_buffer<A>(random, size.width);
    const auto run = [&]<class N>(N) {
      return plain_norm_backward<T, N>(size, numbers<N>(stream), numbers<N>(weight), numbers<N>(grad_y),
                                       {numbers<N>(before), numbers<N>(weight_before)});
    };
    const auto plain = run(A{});
    const auto exact = run(Exact<T>{});
    auto y = stream;
    auto rstd = filled_buffer<A>(size.rows, 0);
    rows::rms_norm<T>(size.rows, size.width, stream.data(), weight.data(), kEps, y.data(), rstd.data());
    for_each_set(3, [&] {
      auto grad_stream = before;
      auto grad_weight = weight_before;
      rows::add_rms_norm_backward<T>(size.rows, size.width, stream.data(), weight.data(), rstd.data(), grad_y.data(),
                                     grad_stream.data(), grad_weight.data());
      // rstd 6, n, u, their product and mean, difference, product, sum.
      EXPECT_TRUE(as_good_as_plain(grad_stream, plain.stream, exact.stream, 12));
      EXPECT_TRUE(as_good_as_plain(grad_weight, plain.weight, exact.weight, 9));
      omp_set_num_threads(1);  // any number gives the same bits
      auto again_stream = before;
      auto again_weight = weight_before;
      rows::add_rms_norm_backward<T>(size.rows, size.width, stream.data(), weight.data(), rstd.data(), grad_y.data(),
                                     again_stream.data(), again_weight.data());
      EXPECT_TRUE(same_bits(again_stream, grad_stream));
      EXPECT_TRUE(same_bits(again_weight, grad_weight));
      omp_set_num_threads(3);
    });
  }
}

TEST(RmsNormGradient, IsTheDerivativeOfTheForward) {
  const Size size{3, 13};
  std::mt19937_64 random(4);
  auto stream = random_buffer<double>(random, size.rows * size.width),
       weight = random_buffer<double>(random, size.width);
  const auto c = random_buffer<double>(random, size.rows * size.width);
  auto y = stream;
  auto rstd = filled_buffer<double>(size.rows, 0);
  const auto loss = [&] {
    rows::rms_norm<double>(size.rows, size.width, stream.data(), weight.data(), kEps, y.data(), rstd.data());
    double sum = 0;
    for (std::size_t i = 0; i < c.size() - kGuard; ++i) sum += c[i] * y[i];
    return sum;
  };
  loss();
  auto grad_stream = filled_buffer<double>(size.rows * size.width, 0),
       grad_weight = filled_buffer<double>(size.width, 0);
  rows::add_rms_norm_backward<double>(size.rows, size.width, stream.data(), weight.data(), rstd.data(), c.data(),
                                      grad_stream.data(), grad_weight.data());
  // |loss| of about 10, rounded 40 times, over h = 1e-3: 40 * 1e-15 / 1e-3; truncation is far below.
  for (std::size_t i = 0; i < stream.size() - kGuard; ++i)
    EXPECT_NEAR(grad_stream[i], derivative(&stream[i], loss), 4e-11);
  for (std::size_t i = 0; i < weight.size() - kGuard; ++i)
    EXPECT_NEAR(grad_weight[i], derivative(&weight[i], loss), 4e-11);
}

}  // namespace
}  // namespace espalier
