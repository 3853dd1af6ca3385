#include "espalier/checkpoint/strided_copy.h"

#include <algorithm>
#include <cstring>

namespace espalier {
namespace {

template <class T>
void copy_strided(std::int64_t rows, std::int64_t columns, std::int64_t row_step, std::int64_t column_step,
                  std::int64_t out_row_step, std::int64_t out_column_step, const std::byte* in, std::byte* out) {
  constexpr std::int64_t kTile = 64;
  for (std::int64_t r0 = 0; r0 < rows; r0 += kTile)
    for (std::int64_t c0 = 0; c0 < columns; c0 += kTile)
      for (std::int64_t r = r0; r < std::min(rows, r0 + kTile); ++r)
        for (std::int64_t c = c0; c < std::min(columns, c0 + kTile); ++c)
          std::memcpy(out + (r * out_row_step + c * out_column_step) * static_cast<std::int64_t>(sizeof(T)),
                      in + (r * row_step + c * column_step) * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
}

}  // namespace

void copy_strided(std::int64_t element_bytes, std::int64_t rows, std::int64_t columns, std::int64_t row_step,
                  std::int64_t column_step, std::int64_t out_row_step, std::int64_t out_column_step,
                  const std::byte* in, std::byte* out) {
  const auto copy = [&]<class T>() {
    copy_strided<T>(rows, columns, row_step, column_step, out_row_step, out_column_step, in, out);
  };
  if (element_bytes == 2) return copy.template operator()<std::uint16_t>();
  if (element_bytes == 4) return copy.template operator()<std::uint32_t>();
  copy.template operator()<std::uint64_t>();
}

}  // namespace espalier
