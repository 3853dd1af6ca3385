#include "espalier/gradient/gradient_set.h"

#include <array>

#include "espalier/ops/operations.h"

namespace espalier {

GradientSet::GradientSet(const ParameterTable& table, const LocalShape& shape, at::ScalarType accumulator,
                         Device& device, const Mesh& mesh)
    : table_(table),
      device_(device),
      flat_(device.allocate({table.kept_size()}, accumulator)),
      rooms_(device.allocate({table.units().rooms + table.units().sums}, accumulator)),
      views_(view_model(std::array{FlatParameters{table, flat_, rooms_}}, shape)) {
  if (table.sharded())
    scattered_.emplace(table, flat_, rooms_, mesh, device);
  else if (mesh.replicas.size() > 1 || mesh.expert_replicas.size() > 1)
    sums_.emplace(shape, flat_, mesh);
  zero();
}

Guest* GradientSet::guest() {
  if (scattered_) return &*scattered_;
  return sums_ ? &*sums_ : nullptr;
}

void GradientSet::zero() { device_.operations().zero(flat_); }

void GradientSet::begin_last_backward() {
  if (sums_) sums_->begin_last_backward();
}

void GradientSet::finish_sums() {
  if (sums_) sums_->finish();
  if (scattered_) scattered_->finish();
}

at::Tensor GradientSet::kept(const Parameter& parameter) const {
  const Kept kept = table_.kept(parameter);
  return flat_.narrow(0, kept.place, kept.count);
}

// Ranks with other parts take part in a sum, too: each part has a place of its own in it.
void GradientSet::add_shares(Group& tp) {
  const Operations& ops = device_.operations();
  for (const Parameter& parameter : table_.parameters()) {
    const Shard& shard = parameter.shard;
    if (!shard.partial_gradient) continue;
    const at::Tensor own = kept(parameter);  // the same elements of it on all ranks of tp
    if (own.numel() == 0) continue;
    const at::Tensor parts = device_.allocate({tp.size() / shard.copies, own.numel()}, flat_.scalar_type());
    const at::Tensor place = parts.select(0, tp.rank() / shard.copies);
    ops.zero(parts);
    ops.convert(own, place);
    tp.add_over_ranks(parts);
    ops.convert(place, own);
  }
}

}  // namespace espalier
