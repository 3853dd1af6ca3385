#include "espalier/base/quantised_rows.h"

#include <algorithm>
#include <cstring>

#include "espalier/base/error.h"
#include "espalier/base/nf4.h"

namespace espalier::quantised {

RowHeader header_of(const std::byte* row) {
  RowHeader header;
  std::memcpy(&header, row, sizeof(header));
  return header;
}

const Rows& rows_of(Kind kind) {
  static const Rows of_nf4 = nf4::rows();
  ESPALIER_INTERNAL(kind == Kind::nf4, "rows of kind ", static_cast<int>(kind));
  return of_nf4;
}

void row_values(const std::byte* row, std::int64_t first, std::int64_t count, float* out) {
  const Kind kind = header_of(row).kind;
  if (kind == Kind::none)
    std::fill_n(out, count, 0.0F);
  else
    rows_of(kind).values(row, first, count, out);
}

}  // namespace espalier::quantised
