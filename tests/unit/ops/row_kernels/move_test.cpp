// Rows moved, added and converted: exact, or one rounding for each addition.
#include <limits>

#include "tests/unit/ops/row_kernels/row_cases.h"

namespace espalier {
namespace {

constexpr std::int64_t kTableRows = 6;  // fewer than rows: ids repeat

std::vector<std::int32_t> random_ids(std::mt19937_64& random, std::int64_t rows) {
  std::vector<std::int32_t> ids;
  for (std::int64_t r = 0; r < rows; ++r) ids.push_back(static_cast<std::int32_t>(random() % kTableRows));
  return ids;
}

template <class In, class Out>
void check_scatter_and_add() {
  using A = accumulator_t<Out>;
  for (Size size : kSizes) {
    SCOPED_TRACE(::testing::Message() << "seed 14, rows " << size.rows << ", width " << size.width);
    std::mt19937_64 random(14);
    const auto x = random_buffer<In>(random, size.rows * size.width);
    const auto before = random_buffer<Out>(random, kTableRows * size.width);
    const auto flat_before = random_buffer<Out>(random, size.rows * size.width);
    const auto ids = random_ids(random, size.rows);
    auto expected = numbers<A>(before), flat_expected = numbers<A>(flat_before);
    for (std::int64_t r = 0; r < size.rows; ++r) {
      for (std::int64_t m = 0; m < size.width; ++m) {
        const auto at = static_cast<std::size_t>(r * size.width + m);
        A& into = expected[static_cast<std::size_t>(ids[static_cast<std::size_t>(r)] * size.width + m)];
        into = stored<Out>(into + number<A>(x[at]));
        flat_expected[at] = stored<Out>(flat_expected[at] + number<A>(x[at]));
      }
    }
    for_each_set(3, [&] {
      auto into = before;
      rows::add_scatter<In, Out>(size.rows, size.width, x.data(), ids.data(), into.data());
      EXPECT_EQ(numbers<A>(into), expected);
      auto flat = flat_before;
      rows::add<In, Out>(size.rows * size.width, x.data(), flat.data());
      EXPECT_EQ(numbers<A>(flat), flat_expected);
    });
  }
}

TEST(ScatterAdd, AddsRepeatedIdsInRowOrder) {
  check_scatter_and_add<float, float>();
  check_scatter_and_add<double, double>();
  check_scatter_and_add<bfloat16, bfloat16>();
  check_scatter_and_add<bfloat16, float>();
  check_scatter_and_add<float, bfloat16>();
}

template <class T>
void check_gather() {
  for (Size size : kSizes) {
    std::mt19937_64 random(15);
    const auto table = random_buffer<T>(random, kTableRows * size.width);
    const auto ids = random_ids(random, size.rows);
    for_each_set(3, [&] {
      auto x = filled_buffer<T>(size.rows * size.width, NAN), expected = x;
      for (std::int64_t r = 0; r < size.rows; ++r)
        for (std::int64_t m = 0; m < size.width; ++m)
          expected[static_cast<std::size_t>(r * size.width + m)] =
              table[static_cast<std::size_t>(ids[static_cast<std::size_t>(r)] * size.width + m)];
      rows::gather<T>(size.rows, size.width, table.data(), ids.data(), x.data());
      EXPECT_TRUE(same_bits(x, expected)) << size.rows << " x " << size.width;
    });
  }
}

TEST(Gather, CopiesTheRowOfEachId) {
  check_gather<float>();
  check_gather<double>();
  check_gather<bfloat16>();
}

template <class In, class Out>
void check_convert() {
  for (Size size : kSizes) {
    for (std::int64_t gap : {0, 3}) {
      std::mt19937_64 random(16);
      const std::int64_t in_stride = size.width + gap, out_stride = size.width + 2 * gap;
      const auto in = random_buffer<In>(random, size.rows * in_stride);
      const auto before = filled_buffer<Out>(size.rows * out_stride, 9);
      auto expected = before;
      for (std::int64_t r = 0; r < size.rows; ++r)
        for (std::int64_t m = 0; m < size.width; ++m)
          expected[static_cast<std::size_t>(r * out_stride + m)] =
              of<Out>(number<double>(in[static_cast<std::size_t>(r * in_stride + m)]));
      for_each_set(3, [&] {
        auto out = before;
        rows::convert<In, Out>(size.rows, size.width, in.data(), in_stride, out.data(), out_stride);
        EXPECT_TRUE(same_bits(out, expected)) << size.rows << " x " << size.width << " gap " << gap;
      });
    }
  }
}

TEST(Convert, RoundsOnceAndKeepsGapsBetweenRows) {
  check_convert<float, float>();
  check_convert<double, double>();
  check_convert<bfloat16, bfloat16>();
  check_convert<bfloat16, float>();
  check_convert<float, bfloat16>();
  check_convert<float, double>();
  check_convert<double, float>();
}

TEST(Convert, RoundsTiesToEvenAndKeepsSpecialValues) {
  constexpr float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  // 1 + 2^-8 is half way between 1 and 1 + 2^-7; 1 + 3 2^-8 half way between 1 + 2^-7 and 1 + 2^-6.
  const std::vector<float> in = {1 + 0x1p-8f, 1 + 0x1.8p-7f, -1 - 0x1p-8f, 1 + 0x1.01p-8f, inf, -inf,
                                 nan,         -0.0f,         0x1.fffp127f, 0x1p-140f,      0};
  const std::vector<std::uint16_t> expected = {0x3f80, 0x3f82, 0xbf80, 0x3f81, 0x7f80, 0xff80,
                                               0x7fc0, 0x8000, 0x7f80, 0x0000, 0x0000};
  for_each_set(3, [&] {
    for (std::size_t copies : {1u, 3u}) {  // also within whole vectors
      std::vector<float> values;
      for (std::size_t c = 0; c < copies; ++c) values.insert(values.end(), in.begin(), in.end());
      std::vector<bfloat16> out(values.size());
      rows::convert<float, bfloat16>(1, static_cast<std::int64_t>(values.size()), values.data(), 0, out.data(), 0);
      for (std::size_t i = 0; i < out.size(); ++i) EXPECT_EQ(out[i].bits, expected[i % in.size()]) << i;
    }
  });
}

TEST(Convert, SmallestValuesRoundToEven) {
  const float value = 0x1.8p-133f;  // half way between one and two units of the smallest bfloat16, 2^-133
  bfloat16 out;
  for_each_set(3, [&] {
    rows::convert<float, bfloat16>(1, 1, &value, 1, &out, 1);
    EXPECT_EQ(out.bits, 2);
  });
}

}  // namespace
}  // namespace espalier
