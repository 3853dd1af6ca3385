// Layouts of tiles in shared memory, of the names of factors, and of a warpgroup's registers, as tests expect them.
// instructions_test.cpp holds the kernels' functions and the emulation to them, cute_witness_test.cpp compares them
// with CuTe's.
#pragma once

#include <cstddef>

namespace espalier::testing {

// Byte offsets from the begin of a tile [rows, columns] of bfloat16, in parts of 64 columns, swizzled within 128 bytes.
inline std::size_t swizzled_byte(std::size_t byte) { return byte ^ ((byte & (7 << 7)) >> 3); }
inline std::size_t byte_in_tile(int rows, int row, int column) {
  return swizzled_byte(static_cast<std::size_t>(column / 64 * rows * 128 + row * 128 + column % 64 * 2));
}
// Bytes from a factor to the one 16 n columns further, read rows first, and 16 n rows further, read columns first.
inline int bytes_columns_further(int rows, int n) { return n / 4 * rows * 128 + n % 4 * 32; }
inline int bytes_rows_further(int n) { return n * 16 * 128; }
// Fields of a factor's name: the distance of groups of eight rows, and of parts where columns come first.
inline constexpr int kEightRowsBytes = 8 * 128;
inline int part_bytes(int rows) { return rows * 128; }
inline constexpr int kSwizzle128 = 1;

struct Element {
  int row, column;
};
// Number i of a thread's results of a product [64, N], and of its eight elements of a left factor [64, 16].
inline Element result_element(int thread, int i) {
  return {thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8, i / 4 * 8 + thread % 4 * 2 + i % 2};
}
inline Element factor_element(int thread, int i) { return result_element(thread, i); }

}  // namespace espalier::testing
