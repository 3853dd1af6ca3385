// Copies between a matrix and a part of a tensor.
#pragma once

#include <cstddef>
#include <cstdint>

namespace espalier {

// Copies elements (r, c) of [rows, columns] from `in`, at r row_step + c column_step, to `out`, at
// r out_row_step + c out_column_step. Steps are in elements of 2, 4 or 8 bytes.
void copy_strided(std::int64_t element_bytes, std::int64_t rows, std::int64_t columns, std::int64_t row_step,
                  std::int64_t column_step, std::int64_t out_row_step, std::int64_t out_column_step,
                  const std::byte* in, std::byte* out);

}  // namespace espalier
