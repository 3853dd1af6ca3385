#include "espalier/generate/whole_logits.h"

#include <algorithm>

#include "espalier/device/scalar_type.h"
#include "espalier/ops/operations.h"

namespace espalier {

at::Tensor whole_logits(const Decoder& decoder, const at::Tensor& logits_BV, Arena& arena) {
  Group& tp = decoder.mesh().tp;
  if (tp.size() == 1) return logits_BV;
  const Operations& ops = decoder.device().operations();
  const std::int64_t rows = logits_BV.size(0), part = decoder.shape().vocabulary,
                     all = decoder.local().whole().vocabulary;
  const at::ScalarType dtype = logits_BV.scalar_type();
  const at::Tensor whole_BV = arena.take({rows, all}, dtype), own_BV = arena.take({rows, part}, dtype),
                   parts = arena.take({tp.size(), rows, part}, dtype);
  ops.zero(own_BV);
  ops.convert(logits_BV, own_BV.narrow(1, 0, logits_BV.size(1)));
  tp.gather(own_BV, parts);
  for (std::int64_t rank = 0, first = 0; first < all; ++rank, first += part) {
    const std::int64_t count = std::min(part, all - first);
    ops.convert(parts.select(0, rank).narrow(1, 0, count), whole_BV.narrow(1, first, count));
  }
  return whole_BV;
}

}  // namespace espalier
