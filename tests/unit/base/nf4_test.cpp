// Rows in NF4 against the formula in base/nf4.h, written out a number at a time.
#include "espalier/base/nf4.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

namespace espalier::nf4 {
namespace {

std::vector<float> random_numbers(std::int64_t count, std::uint32_t seed) {
  std::mt19937 bits(seed);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(static_cast<std::size_t>(count));
  for (float& x : numbers) x = static_cast<float>(bfloat16(normal(bits)));
  return numbers;
}

Matrix quantised(std::int64_t rows, std::int64_t columns, const std::vector<float>& numbers) {
  return quantise(rows, columns, Rounding::bfloat16,
                  [&](std::int64_t n, float* out) { std::copy_n(numbers.begin() + n * columns, columns, out); });
}

Matrix not_nested(Matrix matrix, const std::vector<float>& numbers) {
  matrix.nested_codes = nullptr;
  matrix.absmax.clear();
  for (std::int64_t b = 0; b < matrix.blocks(); ++b) {
    float most = 0;
    for (std::int64_t i = 0; i < kBlock; ++i)
      most = std::max(most, std::abs(numbers[static_cast<std::size_t>(b * kBlock + i)]));
    matrix.absmax.push_back(most);
  }
  return matrix;
}

// w of the formula.
float number_of(const Matrix& m, std::int64_t i) {
  const auto at = static_cast<std::size_t>(i);
  const std::uint8_t pair = m.codes[at / 2];
  const std::size_t block = at / static_cast<std::size_t>(kBlock), code = i % 2 == 0 ? pair >> 4U : pair & 15U;
  volatile float absmax = m.nested() ? standard_map()[m.nested_codes[block]] * m.absmax[block / kNestedBlock]
                                     : m.absmax[block];  // rounded on its own
  if (m.nested()) absmax = absmax + m.offset;
  return static_cast<float>(bfloat16(kCodes[code] * absmax));
}

std::vector<std::byte> rows_of(const Matrix& m, std::int64_t begin, std::int64_t end) {
  const std::int64_t bytes = row_bytes(end - begin, m.nested());
  std::vector<std::byte> out(static_cast<std::size_t>(m.rows * bytes));
  for (std::int64_t n = 0; n < m.rows; ++n) write_row(m, n, begin, end, out.data() + n * bytes);
  return out;
}

// Rows that begin at every place of a factor's blocks, with one block, some, and more than a factor has.
TEST(Nf4, RowsOfAnyPartHaveTheNumbersOfTheFormula) {
  for (const std::int64_t columns : {std::int64_t{64}, std::int64_t{320}, 259 * kBlock}) {
    const std::int64_t rows = columns == 64 ? 520 : 5;
    const std::vector<float> numbers = random_numbers(rows * columns, 7);
    const Matrix nested = quantised(rows, columns, numbers),
                 plain = not_nested(quantised(rows, columns, numbers), numbers);
    for (const Matrix* const m : {&nested, &plain})
      for (const std::int64_t begin : {std::int64_t{0}, columns / kBlock / 2 * kBlock}) {
        const std::vector<std::byte> all = rows_of(*m, begin, columns);
        const std::int64_t width = columns - begin, bytes = row_bytes(width, m->nested());
        for (std::int64_t n = 0; n < rows; ++n) {
          const std::byte* const row = all.data() + n * bytes;
          ASSERT_EQ(quantised::header_of(row).columns, width);
          std::vector<float> found(static_cast<std::size_t>(width) - 2);
          row_values(row, 2, width - 2, found.data());  // from within a block
          for (std::int64_t i = 2; i < width; ++i)
            ASSERT_EQ(found[static_cast<std::size_t>(i - 2)], number_of(*m, n * columns + begin + i))
                << columns << " columns from " << begin << ", row " << n << ", number " << i;
        }
      }
  }
}

// A number is at most half of the widest gap between codes away, and what absmax loses.
TEST(Nf4, NumbersAreTheNearestThatABlockHas) {
  const std::vector<float> numbers = random_numbers(64 * 320, 11);
  const Matrix m = not_nested(quantised(64, 320, numbers), numbers);
  for (std::int64_t i = 0; i < 64 * 320; ++i) {
    const float x = numbers[static_cast<std::size_t>(i)], absmax = m.absmax[static_cast<std::size_t>(i / kBlock)];
    double nearest = HUGE_VAL;
    for (const float code : kCodes) nearest = std::min(nearest, std::abs(static_cast<double>(code) * absmax - x));
    // The number is rounded to 8 bits, an error of 2^-8 of it, and scaled with a rounded inverse before codes are
    // compared.
    EXPECT_LE(std::abs(static_cast<double>(number_of(m, i)) - x), nearest + absmax * (0x1p-8 + 0x1p-22)) << i;
  }
}

TEST(Nf4, ABlockOfZerosStaysZero) {
  const Matrix m = not_nested(quantised(2, 64, std::vector<float>(128, 0)), std::vector<float>(128, 0));
  const std::vector<std::byte> rows = rows_of(m, 0, 64);
  std::vector<float> found(64, 1);
  row_values(rows.data(), 0, 64, found.data());
  EXPECT_TRUE(std::ranges::all_of(found, [](float x) { return x == 0; }));
}

TEST(Nf4, FourBitsAndAnEighthOfANumberArePlanned) {
  EXPECT_EQ(row_bytes(4096, true), 16 + 2 * 4 + 64 + 2048);
  EXPECT_EQ(row_bytes(4096, false), 16 + 4 * 64 + 2048);
  EXPECT_LT(8.0 * static_cast<double>(row_bytes(4096, true)) / 4096, 4.2);
}

TEST(Nf4, EqualMapsHaveOneIndex) {
  Map other = standard_map();
  other[0] = -2;
  EXPECT_EQ(index_of(standard_map()), index_of(standard_map()));
  EXPECT_NE(index_of(standard_map()), index_of(other));
  EXPECT_EQ(index_of(other), index_of(other));
}

}  // namespace
}  // namespace espalier::nf4
