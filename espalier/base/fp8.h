// FP8 matrices: 8 bits a number (e4m3: a sign, 4 bits of exponent, 3 of mantissa; the largest is 448, and codes 0x7f
// and 0xff are NaN), and a float32 scale for each block of rows and columns, as DeepSeek-V3 and Qwen3-FP8 store
// weights.
//
//   w_rc = value(code_rc) scale_{r / block_rows, c / block_columns}    in float32
// The blocks at the last rows and columns may be smaller. With blocks of kWholeRow columns each row has one scale.
//
// A row in memory (base/quantised_rows.h): Header, the scales of the blocks that its columns lie in, the codes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "espalier/base/quantised_rows.h"

namespace espalier::fp8 {

inline constexpr std::int32_t kWholeRow = std::numeric_limits<std::int32_t>::max();
inline constexpr std::int32_t kMostColumns = 1 << 15;  // of a block that is not a whole row

struct Header {
  quantised::RowHeader row;  // place: of the row's first number in its block
  std::int32_t block_columns;
  std::uint32_t unused;
};
static_assert(sizeof(Header) == 16);

float value_of(std::uint8_t code);
// The nearest code, of two the even one; 448 is the largest.
std::uint8_t code_of(float value);
inline bool is_nan(std::uint8_t code) { return (code & 0x7fU) == 0x7fU; }

std::int64_t row_bytes(std::int64_t columns, std::int64_t block_columns);
void row_values(const std::byte* row, std::int64_t first, std::int64_t count, float* out);

struct Matrix : quantised::Matrix {
  std::string where;  // named in errors
  std::int64_t rows = 0, columns = 0;
  std::int64_t first_row = 0;  // in the blocks, where this is a part of a matrix
  std::int32_t block_rows = 0, block_columns = 0;
  const std::uint8_t* codes = nullptr;   // [rows * columns]
  std::vector<float> scales;             // by blocks of rows, then of columns
  std::vector<std::uint8_t> made_codes;  // where they lie in no file

  std::int64_t blocks_of_row() const { return (columns + block_columns - 1) / block_columns; }
  const float* scales_of(std::int64_t row) const {
    return scales.data() + (first_row + row) / block_rows * blocks_of_row();
  }

  quantised::Form form() const override;
  // Errors: InputError for a code that stands for NaN.
  void write_row(std::int64_t row, std::int64_t begin, std::int64_t end, std::int64_t width,
                 std::byte* out) const override;
  std::span<const std::byte> stored_codes() const override;
  std::shared_ptr<const quantised::Matrix> part(std::int64_t first, std::int64_t count) const override;
};

quantised::Rows rows();

}  // namespace espalier::fp8
