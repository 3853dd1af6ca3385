// QK-norm and rotary positions, forward and backward.
#include "tests/unit/ops/row_kernels/row_cases.h"

namespace espalier {
namespace {

struct Heads {
  std::int64_t rows, heads, head_dim;
  std::int64_t in_stride() const { return heads * head_dim + 5; }
  std::int64_t out_stride() const { return heads * head_dim + 3; }
};
constexpr Heads kHeads[] = {{0, 2, 8},  {1, 1, 2},  {1, 1, 8},   {7, 3, 14},
                            {5, 2, 64}, {9, 1, 80}, {65, 5, 96}, {200, 2, 128}};
constexpr std::int64_t kPositions = 40;
constexpr double kNormEps = 1e-6;

template <class T>
struct RotateCase {
  using A = accumulator_t<T>;
  Heads heads;
  Buffer<T> in, weight;
  Buffer<A> cos, sin;
  std::vector<std::int32_t> position;

  RotateCase(Heads shape, std::mt19937_64& random) : heads(shape) {
    in = random_buffer<T>(random, heads.rows * heads.in_stride());
    weight = random_buffer<T>(random, heads.head_dim);
    cos = filled_buffer<A>(kPositions * heads.head_dim / 2, 0);
    sin = cos;
    for (std::int64_t p = 0; p < kPositions; ++p) {
      for (std::int64_t i = 0; i < heads.head_dim / 2; ++i) {
        const double angle = static_cast<double>(p) *
                             std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(heads.head_dim));
        cos[static_cast<std::size_t>(p * heads.head_dim / 2 + i)] = static_cast<A>(std::cos(angle));
        sin[static_cast<std::size_t>(p * heads.head_dim / 2 + i)] = static_cast<A>(std::sin(angle));
      }
    }
    for (std::int64_t r = 0; r < heads.rows; ++r) position.push_back(static_cast<std::int32_t>(random() % kPositions));
  }
  rows::HeadShape shape() const { return {heads.rows, heads.heads, heads.head_dim, kNormEps, position.data()}; }
};

template <class T, class N>
N head_rstd(const std::vector<N>& in, std::size_t first, std::int64_t head_dim) {
  N squares = 0;
  for (std::int64_t d = 0; d < head_dim; ++d)
    squares += in[first + static_cast<std::size_t>(d)] * in[first + static_cast<std::size_t>(d)];
  return N(1) / std::sqrt(squares / static_cast<N>(head_dim) + static_cast<N>(kNormEps));
}

// Into `out` as it was, so that gaps between rows keep their values. The angles are part of the input: rounded to T in
// the oracle too, as the model defines them.
template <class T, class N>
std::vector<N> plain_rotate(const RotateCase<T>& c, bool norm, std::vector<N> out) {
  const auto in = numbers<N>(c.in), weight = numbers<N>(c.weight);
  const auto half = static_cast<std::size_t>(c.heads.head_dim / 2);
  for (std::int64_t r = 0; r < c.heads.rows; ++r) {
    for (std::int64_t h = 0; h < c.heads.heads; ++h) {
      const auto x = static_cast<std::size_t>(r * c.heads.in_stride() + h * c.heads.head_dim);
      const auto y = static_cast<std::size_t>(r * c.heads.out_stride() + h * c.heads.head_dim);
      const N rstd = norm ? head_rstd<T>(in, x, c.heads.head_dim) : N(1);
      for (std::size_t i = 0; i < half; ++i) {
        const auto angle = static_cast<std::size_t>(c.position[static_cast<std::size_t>(r)]) * half + i;
        const N cosine = number<N>(stored<T>(c.cos[angle])), sine = number<N>(stored<T>(c.sin[angle]));
        N a = in[x + i], b = in[x + half + i];
        if (norm) {
          a = stored<T>(stored<T>(a * rstd) * weight[i]);
          b = stored<T>(stored<T>(b * rstd) * weight[half + i]);
        }
        out[y + i] = stored<T>(stored<T>(a * cosine) - stored<T>(b * sine));
        out[y + half + i] = stored<T>(stored<T>(b * cosine) + stored<T>(a * sine));
      }
    }
  }
  return out;
}

template <class N>
struct RotateGradient {
  std::vector<N> in, weight;
};
template <class T, class N>
RotateGradient<N> plain_rotate_backward(const RotateCase<T>& c, bool norm, const std::vector<N>& grad_out,
                                        RotateGradient<N> into) {
  const auto in = numbers<N>(c.in), weight = numbers<N>(c.weight);
  const auto half = static_cast<std::size_t>(c.heads.head_dim / 2);
  for (std::int64_t r = 0; r < c.heads.rows; ++r) {
    for (std::int64_t h = 0; h < c.heads.heads; ++h) {
      const auto x = static_cast<std::size_t>(r * c.heads.in_stride() + h * c.heads.head_dim);
      const auto y = static_cast<std::size_t>(r * c.heads.out_stride() + h * c.heads.head_dim);
      std::vector<N> g(2 * half);
      for (std::size_t i = 0; i < half; ++i) {
        const auto angle = static_cast<std::size_t>(c.position[static_cast<std::size_t>(r)]) * half + i;
        const N cosine = number<N>(stored<T>(c.cos[angle])), sine = number<N>(stored<T>(c.sin[angle]));
        g[i] = grad_out[y + i] * cosine + grad_out[y + half + i] * sine;
        g[half + i] = grad_out[y + half + i] * cosine - grad_out[y + i] * sine;
      }
      const N rstd = norm ? head_rstd<T>(in, x, c.heads.head_dim) : N(1);
      N dot = 0;
      for (std::size_t d = 0; norm && d < 2 * half; ++d) dot += g[d] * weight[d] * in[x + d] * rstd;
      for (std::size_t d = 0; d < 2 * half; ++d) {
        if (norm) {
          const N n = in[x + d] * rstd;
          into.in[x + d] = stored<T>(rstd * (g[d] * weight[d] - n * dot / static_cast<N>(2 * half)));
          into.weight[d] += g[d] * stored<T>(n);
        } else {
          into.in[x + d] = stored<T>(g[d]);
        }
      }
    }
  }
  return into;
}

template <class T>
class NormRotate : public ::testing::Test {};
using Types = ::testing::Types<float, double, bfloat16>;
TYPED_TEST_SUITE(NormRotate, Types);

TYPED_TEST(NormRotate, ForwardIsAsAccurateAsAPlainLoopAndKeepsGapsBetweenRows) {
  using T = TypeParam;
  using A = accumulator_t<T>;
  for (Heads heads : kHeads) {
    for (bool norm : {false, true}) {
      SCOPED_TRACE(::testing::Message() << "seed 5, rows " << heads.rows << ", head_dim " << heads.head_dim << ", norm "
                                        << norm);
      std::mt19937_64 random(5);
      const RotateCase<T> c(heads, random);
      const auto before = filled_buffer<T>(heads.rows * heads.out_stride(), 9);
      const auto plain = plain_rotate<T>(c, norm, numbers<A>(before));
      const auto exact = plain_rotate<T>(c, norm, numbers<Exact<T>>(before));
      for_each_set(3, [&] {
        auto out = before;
        rows::norm_rotate<T>(c.shape(), c.in.data(), heads.in_stride(), norm ? c.weight.data() : nullptr, c.cos.data(),
                             c.sin.data(), out.data(), heads.out_stride());
        // The norm 8, then two products and a sum.
        EXPECT_TRUE(as_good_as_plain(out, plain, exact, norm ? 11 : 3));
        for (std::int64_t r = 0; r < heads.rows; ++r)
          for (std::int64_t i = heads.heads * heads.head_dim; i < heads.out_stride(); ++i)
            ASSERT_EQ(number<double>(out[static_cast<std::size_t>(r * heads.out_stride() + i)]), 9);
      });
    }
  }
}

// Products of two bfloat16 are exact in float, so nothing but the order of roundings decides the bits.
// One product is rounded, the other fused, in whole vectors as in the rest of a head: sets with fused products have the
// same bits.
template <class T>
void expect_fused_in_one_way() {
  for (const Heads heads : kHeads) {
    SCOPED_TRACE(::testing::Message() << "seed 8, rows " << heads.rows << ", head_dim " << heads.head_dim);
    std::mt19937_64 random(8);
    const RotateCase<T> c(heads, random);
    const auto before = filled_buffer<T>(heads.rows * heads.out_stride(), 9);
    auto expected = before;
    const std::int64_t half = heads.head_dim / 2;
    for (std::int64_t r = 0; r < heads.rows; ++r)
      for (std::int64_t h = 0; h < heads.heads; ++h)
        for (std::int64_t i = 0; i < half; ++i) {
          const T* const x = c.in.data() + r * heads.in_stride() + h * heads.head_dim + i;
          T* const y = expected.data() + r * heads.out_stride() + h * heads.head_dim + i;
          const auto angle = static_cast<std::size_t>(c.position[static_cast<std::size_t>(r)] * half + i);
          const volatile T bs = x[half] * c.sin[angle], as = x[0] * c.sin[angle];  // rounded
          y[0] = std::fma(x[0], c.cos[angle], -bs);
          y[half] = std::fma(x[half], c.cos[angle], as);
        }
    for_each_set(3, [&] {
      if (instruction_set() == InstructionSet::baseline) return;  // no fused products
      auto out = before;
      rows::norm_rotate<T>(c.shape(), c.in.data(), heads.in_stride(), nullptr, c.cos.data(), c.sin.data(), out.data(),
                           heads.out_stride());
      EXPECT_TRUE(same_bits(out, expected));
    });
  }
}
TEST(RotationOfPairs, FusesOneProductOfFloat32) { expect_fused_in_one_way<float>(); }
TEST(RotationOfPairs, FusesOneProductOfFloat64) { expect_fused_in_one_way<double>(); }

TEST(NormRotateBfloat16, RoundsWhereTransformersRounds) {
  for (Heads heads : kHeads) {
    std::mt19937_64 random(6);
    RotateCase<bfloat16> c(heads, random);
    const auto before = filled_buffer<bfloat16>(heads.rows * heads.out_stride(), 9);
    const auto plain = plain_rotate<bfloat16>(c, false, numbers<float>(before));
    for (auto& value : c.in) value = of<bfloat16>(static_cast<double>(random() % 9) - 4);  // exact sums of squares
    const auto plain_norm = plain_rotate<bfloat16>(c, true, numbers<float>(before));
    const RotateCase<bfloat16> integers = c;
    std::mt19937_64 same(6);
    const RotateCase<bfloat16> normal(heads, same);
    for_each_set(3, [&] {
      auto out = before, out_norm = before;
      rows::norm_rotate<bfloat16>(normal.shape(), normal.in.data(), heads.in_stride(), nullptr, normal.cos.data(),
                                  normal.sin.data(), out.data(), heads.out_stride());
      EXPECT_EQ(numbers<float>(out), plain);
      rows::norm_rotate<bfloat16>(integers.shape(), integers.in.data(), heads.in_stride(), integers.weight.data(),
                                  integers.cos.data(), integers.sin.data(), out_norm.data(), heads.out_stride());
      EXPECT_EQ(numbers<float>(out_norm), plain_norm);
    });
  }
}

template <class T, class G>
void check_backward(Heads heads, bool norm) {
  using A = accumulator_t<T>;
  SCOPED_TRACE(::testing::Message() << "seed 7, rows " << heads.rows << ", head_dim " << heads.head_dim << ", norm "
                                    << norm);
  std::mt19937_64 random(7);
  const RotateCase<T> c(heads, random);
  const auto grad_out = random_buffer<G>(random, heads.rows * heads.out_stride());
  const auto before = filled_buffer<T>(heads.rows * heads.in_stride(), 9);
  const auto weight_before = random_buffer<A>(random, heads.head_dim);
  const auto run = [&]<class N>(N) {
    return plain_rotate_backward<T, N>(c, norm, numbers<N>(grad_out), {numbers<N>(before), numbers<N>(weight_before)});
  };
  const auto plain = run(A{});
  const auto exact = run(Exact<T>{});
  for_each_set(3, [&] {
    const auto call = [&](Buffer<T>& grad_in, Buffer<A>& grad_weight) {
      rows::add_norm_rotate_backward<T, G>(c.shape(), norm ? c.in.data() : nullptr, heads.in_stride(),
                                           norm ? c.weight.data() : nullptr, c.cos.data(), c.sin.data(),
                                           grad_out.data(), heads.out_stride(), grad_in.data(), heads.in_stride(),
                                           norm ? grad_weight.data() : nullptr);
    };
    auto grad_in = before, again_in = before;
    auto grad_weight = weight_before, again_weight = weight_before;
    call(grad_in, grad_weight);
    // Rotation 3; then as the norm's backward.
    EXPECT_TRUE(as_good_as_plain(grad_in, plain.in, exact.in, norm ? 15 : 3));
    EXPECT_TRUE(as_good_as_plain(grad_weight, plain.weight, exact.weight, norm ? 12 : 0));
    omp_set_num_threads(1);  // any number gives the same bits
    call(again_in, again_weight);
    EXPECT_TRUE(same_bits(again_in, grad_in));
    EXPECT_TRUE(same_bits(again_weight, grad_weight));
    omp_set_num_threads(3);
    for (std::int64_t r = 0; r < heads.rows; ++r)
      for (std::int64_t i = heads.heads * heads.head_dim; i < heads.in_stride(); ++i)
        ASSERT_EQ(number<double>(grad_in[static_cast<std::size_t>(r * heads.in_stride() + i)]), 9);
  });
}

TYPED_TEST(NormRotate, BackwardIsAsAccurateAsAPlainLoop) {
  for (Heads heads : kHeads) {
    for (bool norm : {false, true}) {
      check_backward<TypeParam, TypeParam>(heads, norm);
      check_backward<TypeParam, accumulator_t<TypeParam>>(heads, norm);
    }
  }
}

// Heads whose first channels stay, as of latent attention: the others as heads of their own, in place as well.
TYPED_TEST(NormRotate, BehindChannelsThatStayIsTheRotationOfTheOthers) {
  using T = TypeParam;
  for (const bool interleaved : {false, true})
    for (const std::int64_t first : {1, 5, 16}) {
      std::mt19937_64 random(9);
      const RotateCase<T> c({9, 3, 8}, random);  // the channels that rotate
      const std::int64_t D = first + 8, width = 3 * D;
      rows::HeadShape shape = c.shape(), alone = c.shape();
      shape.head_dim = D, shape.rotary = 8, shape.first = first;
      shape.interleaved = alone.interleaved = interleaved;
      alone.heads = 1;
      const auto in = random_buffer<T>(random, 9 * width), grad = random_buffer<T>(random, 9 * width);
      for_each_set(3, [&] {
        auto want = in, out = in, want_grad = grad, grad_in = grad;
        for (std::int64_t h = 0; h < 3; ++h) {
          const std::int64_t at = h * D + first;
          rows::norm_rotate<T>(alone, in.data() + at, width, nullptr, c.cos.data(), c.sin.data(), want.data() + at,
                               width);
          rows::add_norm_rotate_backward<T, T>(alone, nullptr, width, nullptr, c.cos.data(), c.sin.data(),
                                               grad.data() + at, width, want_grad.data() + at, width, nullptr);
        }
        rows::norm_rotate<T>(shape, in.data(), width, nullptr, c.cos.data(), c.sin.data(), out.data(), width);
        EXPECT_TRUE(same_bits(out, want));
        out = in;
        rows::norm_rotate<T>(shape, out.data(), width, nullptr, c.cos.data(), c.sin.data(), out.data(), width);
        EXPECT_TRUE(same_bits(out, want)) << "in place";
        rows::add_norm_rotate_backward<T, T>(shape, nullptr, width, nullptr, c.cos.data(), c.sin.data(), grad.data(),
                                             width, grad_in.data(), width, nullptr);
        EXPECT_TRUE(same_bits(grad_in, want_grad));
      });
    }
}

TEST(NormRotateGradient, IsTheDerivativeOfTheForward) {
  const Heads heads{3, 2, 14};
  for (bool norm : {false, true}) {
    std::mt19937_64 random(8);
    RotateCase<double> c(heads, random);
    const auto coefficient = random_buffer<double>(random, heads.rows * heads.out_stride());
    auto out = filled_buffer<double>(heads.rows * heads.out_stride(), 0);
    const auto loss = [&] {
      rows::norm_rotate<double>(c.shape(), c.in.data(), heads.in_stride(), norm ? c.weight.data() : nullptr,
                                c.cos.data(), c.sin.data(), out.data(), heads.out_stride());
      double sum = 0;
      for (std::size_t i = 0; i < out.size() - kGuard; ++i) sum += coefficient[i] * out[i];
      return sum;
    };
    auto grad_in = filled_buffer<double>(heads.rows * heads.in_stride(), 0);
    auto grad_weight = filled_buffer<double>(heads.head_dim, 0);
    rows::add_norm_rotate_backward<double, double>(
        c.shape(), c.in.data(), heads.in_stride(), norm ? c.weight.data() : nullptr, c.cos.data(), c.sin.data(),
        coefficient.data(), heads.out_stride(), grad_in.data(), heads.in_stride(), norm ? grad_weight.data() : nullptr);
    // |loss| of about 10, rounded 100 times, over h = 1e-3.
    for (std::size_t i = 0; i < c.in.size() - kGuard; ++i) EXPECT_NEAR(grad_in[i], derivative(&c.in[i], loss), 1e-10);
    for (std::size_t i = 0; i < c.weight.size() - kGuard; ++i)
      EXPECT_NEAR(grad_weight[i], derivative(&c.weight[i], loss), 1e-10);
  }
}

}  // namespace
}  // namespace espalier
