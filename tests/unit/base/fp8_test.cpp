// Codes, rows and parts of matrices in FP8 against the formula in base/fp8.h, written out a number at a time.
#include "espalier/base/fp8.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "espalier/base/error.h"

namespace espalier::fp8 {
namespace {

// IEEE's reading of e4m3 with a bias of 7.
double number_of(unsigned code) {
  const int exponent = static_cast<int>(code >> 3U & 15U), mantissa = static_cast<int>(code & 7U);
  if ((code & 127U) == 127) return std::numeric_limits<double>::quiet_NaN();
  const double size = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 128U) != 0 ? -size : size;
}

Matrix random_matrix(std::int64_t rows, std::int64_t columns, std::int32_t block_rows, std::int32_t block_columns) {
  std::mt19937 bits(7);
  Matrix out;
  out.where = "m", out.rows = rows, out.columns = columns;
  out.block_rows = block_rows, out.block_columns = block_columns;
  for (std::int64_t i = 0; i < rows * columns; ++i) {
    const auto code = static_cast<std::uint8_t>(bits() % 256);
    out.made_codes.push_back(is_nan(code) ? 0 : code);
  }
  out.codes = out.made_codes.data();
  const std::int64_t blocks = (rows + block_rows - 1) / block_rows * out.blocks_of_row();
  for (std::int64_t b = 0; b < blocks; ++b)
    out.scales.push_back(std::ldexp(1 + static_cast<float>(bits() % 1000), -14));
  return out;
}

float number_of(const Matrix& m, std::int64_t row, std::int64_t column) {
  const float scale =
      m.scales[static_cast<std::size_t>(row / m.block_rows * m.blocks_of_row() + column / m.block_columns)];
  return static_cast<float>(number_of(m.made_codes[static_cast<std::size_t>(row * m.columns + column)])) * scale;
}

TEST(Fp8, EveryCodeHasItsNumber) {
  for (unsigned code = 0; code < 256; ++code) {
    const auto value = static_cast<double>(value_of(static_cast<std::uint8_t>(code)));
    ASSERT_EQ(std::isnan(value), is_nan(static_cast<std::uint8_t>(code))) << code;
    if (std::isnan(value)) continue;
    ASSERT_EQ(value, number_of(code)) << code;
  }
}

TEST(Fp8, NumbersGetTheNearestCodeAndFromTheMiddleTheEvenOne) {
  for (unsigned code = 0; code < 126; ++code) {
    const double low = number_of(code), high = number_of(code + 1), middle = (low + high) / 2;
    const auto even = static_cast<std::uint8_t>(code + code % 2);
    ASSERT_EQ(code_of(static_cast<float>(low)), code);
    ASSERT_EQ(code_of(static_cast<float>(middle)), even) << code;
    ASSERT_EQ(code_of(std::nextafter(static_cast<float>(middle), 0.0F)), code);
    ASSERT_EQ(code_of(-std::nextafter(static_cast<float>(middle), 500.0F)), (code + 1) | 128U);
  }
  ASSERT_EQ(code_of(1e6F), 126);
}

// Parts that begin and end in and between blocks, with padding behind them.
TEST(Fp8, RowsOfAnyPartHaveTheNumbersOfTheFormula) {
  for (const std::int32_t block_columns : {1, 5, 32, kWholeRow}) {
    const Matrix m = random_matrix(7, 41, 3, block_columns);
    for (std::int64_t begin = 0; begin < 41; begin += 4)
      for (std::int64_t end = begin + 1; end <= 41; end += 6)
        for (const std::int64_t width : {end - begin, end - begin + 3}) {
          std::vector<std::byte> row(static_cast<std::size_t>(row_bytes(width, block_columns)) + 4, std::byte{0xab});
          std::vector<float> found(static_cast<std::size_t>(width));
          for (std::int64_t n = 0; n < m.rows; ++n) {
            m.write_row(n, begin, end, width, row.data());
            ASSERT_EQ(row.back(), std::byte{0xab});
            ASSERT_EQ(quantised::header_of(row.data()).columns, width);
            quantised::row_values(row.data(), 0, width, found.data());
            for (std::int64_t i = 0; i < width; ++i)
              ASSERT_EQ(found[static_cast<std::size_t>(i)], i < end - begin ? number_of(m, n, begin + i) : 0)
                  << block_columns << " " << n << " " << begin << " " << end << " " << i;
            const std::int64_t first = (end - begin) / 2 / 2 * 2;
            quantised::row_values(row.data(), first, end - begin - first, found.data());
            for (std::int64_t i = first; i < end - begin; ++i)
              ASSERT_EQ(found[static_cast<std::size_t>(i - first)], number_of(m, n, begin + i));
          }
        }
  }
}

TEST(Fp8, PartsOfRowsReadTheBlocksThatTheyLieIn) {
  const auto whole = std::make_shared<const Matrix>(random_matrix(11, 10, 4, 8));
  for (std::int64_t first = 0; first < 11; ++first) {
    const auto part = whole->part(first, 11 - first);
    std::vector<std::byte> row(static_cast<std::size_t>(row_bytes(10, 8))), wanted = row;
    for (std::int64_t n = 0; n < 11 - first; ++n) {
      part->write_row(n, 0, 10, 10, row.data());
      whole->write_row(first + n, 0, 10, 10, wanted.data());
      ASSERT_EQ(row, wanted) << first << " " << n;
    }
    ASSERT_EQ(part->stored_codes().size(), static_cast<std::size_t>(10 * (11 - first)));
  }
}

TEST(Fp8, RowsOfZeroBytesAreZeros) {
  const std::vector<std::byte> row(static_cast<std::size_t>(row_bytes(40, 32)));
  std::vector<float> found(40, 1.0F);
  quantised::row_values(row.data(), 0, 40, found.data());
  EXPECT_EQ(found, std::vector<float>(40));
}

TEST(Fp8, ACodeOfNanIsRefused) {
  Matrix m = random_matrix(2, 4, 2, 2);
  m.made_codes[6] = 0xff;
  std::vector<std::byte> row(static_cast<std::size_t>(row_bytes(4, 2)));
  m.write_row(0, 0, 4, 4, row.data());
  EXPECT_THROW(m.write_row(1, 0, 4, 4, row.data()), InputError);
}

TEST(Fp8, QuantisedNumbersAreTheNearestOfTheirBlock) {
  const quantised::Form form{.kind = quantised::Kind::fp8, .block_rows = 3, .block_columns = 4};
  std::mt19937 bits(3);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(7 * 10);
  for (float& x : numbers) x = normal(bits);
  const auto m = quantised::rows_of(form.kind).quantise(
      form, 7, 10, [&](std::int64_t n, float* out) { std::copy_n(numbers.begin() + n * 10, 10, out); });
  EXPECT_EQ(m->form(), form);
  std::vector<std::byte> row(static_cast<std::size_t>(row_bytes(10, 4)));
  std::vector<float> found(10);
  for (std::int64_t n = 0; n < 7; ++n) {
    m->write_row(n, 0, 10, 10, row.data());
    row_values(row.data(), 0, 10, found.data());
    for (std::int64_t c = 0; c < 10; ++c) {
      float most = 0;
      for (std::int64_t i = n / 3 * 3; i < std::min<std::int64_t>(7, n / 3 * 3 + 3); ++i)
        for (std::int64_t j = c / 4 * 4; j < std::min<std::int64_t>(10, c / 4 * 4 + 4); ++j)
          most = std::max(most, std::abs(numbers[static_cast<std::size_t>(i * 10 + j)]));
      const float x = numbers[static_cast<std::size_t>(n * 10 + c)];
      // Half of the last place of three bits of mantissa, or of the smallest numbers.
      ASSERT_LE(std::abs(found[static_cast<std::size_t>(c)] - x),
                std::max(std::abs(x) / 16, most / 448 / 1024) * 1.0001F);
    }
  }
}

}  // namespace
}  // namespace espalier::fp8
