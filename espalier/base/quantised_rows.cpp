#include "espalier/base/quantised_rows.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "espalier/base/error.h"
#include "espalier/base/fp8.h"
#include "espalier/base/nf4.h"

namespace espalier::quantised {

RowHeader header_of(const std::byte* row) {
  RowHeader header;
  std::memcpy(&header, row, sizeof(header));
  return header;
}

const Rows& rows_of(Kind kind) {
  static const std::array all{nf4::rows(), fp8::rows()};
  const auto at = static_cast<std::size_t>(kind) - 1;
  ESPALIER_INTERNAL(at < all.size(), "rows of kind ", static_cast<int>(kind));
  return all[at];
}

void row_values(const std::byte* row, std::int64_t first, std::int64_t count, float* out) {
  const Kind kind = header_of(row).kind;
  if (kind == Kind::none)
    std::fill_n(out, count, 0.0F);
  else
    rows_of(kind).values(row, first, count, out);
}

}  // namespace espalier::quantised
