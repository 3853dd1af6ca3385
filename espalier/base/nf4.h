// NF4 matrices: 4 bits a number, as bitsandbytes quantises and stores them (Dettmers et al. 2023, arXiv 2305.14314,
// section 3).
//
// The rows of a matrix [N, K], end to end, are cut into blocks of 64 numbers; here K is a multiple of 64. With a code
// c_i of 16 for each number and the largest magnitude a_b of each block
//
//   w_i = round(kCodes[c_i] a_b)        the product in float32, rounded to the dtype that the matrix was quantised from
//   a_b = map[q_b] m_{b / 256} + o      nested: codes q of 8 bits, a factor m for 256 blocks, one offset o for all
//
// A row in memory (base/quantised_rows.h): Header, the factors m that its blocks use (or all a_b), the codes q, the
// codes c (two in a byte, the first one in the high half).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "espalier/base/dtype.h"
#include "espalier/base/quantised_rows.h"

namespace espalier::nf4 {

inline constexpr std::int64_t kBlock = 64, kNestedBlock = 256;
extern const std::array<float, 16> kCodes;

// The dtype that numbers are rounded to.
enum class Rounding : std::uint8_t { bfloat16, float16, float32 };

struct Header {
  quantised::RowHeader row;  // place: of the row's first block among the 256 of its first factor
  float offset;
  std::uint16_t map;  // map_of's index
  Rounding rounding;
  bool nested;
};
static_assert(sizeof(Header) == 16);

// Bytes of a row of `columns` numbers, a multiple of 4.
std::int64_t row_bytes(std::int64_t columns, bool nested);
// The codes of its numbers: two in a byte.
const std::uint8_t* codes_of(const std::byte* row);
// Overwrites values [count, 16]: what each code stands for in the row's blocks [first, first + count).
void block_values(const std::byte* row, std::int64_t first, std::int64_t count, float* values);
// Overwrites `out` with numbers [first, first + count) of the row; `first` is even.
void row_values(const std::byte* row, std::int64_t first, std::int64_t count, float* out);

// The 256 numbers that codes of 8 bits stand for. A process keeps every map that it has seen; equal ones have one
// index.
using Map = std::array<float, 256>;
std::uint16_t index_of(const Map& map);
// bitsandbytes' dynamic map of 8 bits with a sign: -0.99297 ... 0 ... 0.99297, 1.
const Map& standard_map();

// A whole matrix, as files have it, or made by quantise. `codes` and `nested_codes` may lie in a mapped file.
struct Matrix : quantised::Matrix {
  std::int64_t rows = 0, columns = 0;
  const std::uint8_t* codes = nullptr;         // [rows * columns / 2]
  const std::uint8_t* nested_codes = nullptr;  // [blocks]; null: not nested
  std::vector<float> absmax;                   // [blocks], not nested; else the factors [blocks / 256]
  float offset = 0;
  std::uint16_t map = 0;
  Rounding rounding = Rounding::bfloat16;
  std::vector<std::uint8_t> made_codes, made_nested_codes;  // where they lie in no file

  bool nested() const { return nested_codes != nullptr; }
  std::int64_t blocks() const { return rows * columns / kBlock; }

  quantised::Form form() const override { return {quantised::Kind::nf4, nested()}; }
  void write_row(std::int64_t row, std::int64_t begin, std::int64_t end, std::int64_t width,
                 std::byte* out) const override;
  std::span<const std::byte> stored_codes() const override;
  std::shared_ptr<const quantised::Matrix> part(std::int64_t, std::int64_t) const override { return nullptr; }
};

// Quantises as bitsandbytes does, nested. row(n, out) overwrites out with the numbers of row n.
Matrix quantise(std::int64_t rows, std::int64_t columns, Rounding rounding,
                const std::function<void(std::int64_t n, float* out)>& row);

// Overwrites `out` with columns [begin, end) of one row; both are multiples of 64.
void write_row(const Matrix& matrix, std::int64_t row, std::int64_t begin, std::int64_t end, std::byte* out);

quantised::Rows rows();

}  // namespace espalier::nf4
