#include "espalier/gradient/gradient_set.h"

#include "espalier/ops/operations.h"

namespace espalier {

GradientSet::GradientSet(const ParameterTable& table, const LocalShape& shape, at::ScalarType accumulator,
                         Device& device)
    : table_(table),
      device_(device),
      flat_(device.allocate({table.size()}, accumulator)),
      views_(view_model(flat_, table, shape)) {
  zero();
}

void GradientSet::zero() { device_.operations().zero(flat_); }

// Ranks with other parts take part in a sum, too: each part has a place of its own in it.
void GradientSet::add_shares(Group& tp) {
  const Operations& ops = device_.operations();
  for (const Parameter& parameter : table_.parameters()) {
    const Shard& shard = parameter.shard;
    if (!shard.partial_gradient) continue;
    const at::Tensor own = flat_.narrow(0, parameter.offset, parameter.count);
    const at::Tensor parts = device_.allocate({tp.size() / shard.copies, parameter.count}, flat_.scalar_type());
    const at::Tensor place = parts.select(0, tp.rank() / shard.copies);
    ops.zero(parts);
    ops.convert(own, place);
    tp.add_over_ranks(parts);
    ops.convert(place, own);
  }
}

}  // namespace espalier
