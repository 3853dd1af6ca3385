#include "espalier/train/whole_values.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "espalier/device/host_values.h"

namespace espalier {
namespace {

AdamW::Range overlap(const AdamW::Range& a, const AdamW::Range& b) {
  const std::int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

AdamW::Range range_of(const Parameter& parameter) { return {parameter.offset, parameter.offset + parameter.count}; }

bool is_whole(const Parameter& parameter) { return parameter.shard.dim < 0; }

}  // namespace

WholeValues::WholeValues(const ModelState& model) : model_(model), table_(model.shape) {
  const Degrees& degrees = model.mesh.degrees;
  for (int rank = 0; rank < model.mesh.world.size(); ++rank) {
    ParameterTable table(LocalShape(model.shape, degrees, place_of(rank, degrees)));
    if (std::ranges::any_of(table.parameters(), [](const Parameter& p) { return p.shard.counted; }))
      holders_.push_back({rank, std::move(table)});
  }
}

at::Tensor WholeValues::part_of(const Holder& holder, const Parameter& parameter, const at::Tensor& part,
                                int shares) const {
  Group& world = model_.mesh.world;
  Device& device = model_.decoder.device();
  std::vector<int> sharers{holder.rank};
  if (shares > 1) sharers = ranks_along(Axis::dp, holder.rank, model_.mesh.degrees);
  at::Tensor values;
  for (std::size_t share = 0; share < sharers.size(); ++share) {
    const AdamW::Range kept = AdamW::range_of(holder.table.size(), shares, static_cast<int>(share));
    const AdamW::Range range = overlap(range_of(parameter), kept);
    const std::int64_t count = range.end - range.begin;
    if (count == 0) continue;
    const auto own = [&] { return device.to_host(part.narrow(0, range.begin - kept.begin, count)); };
    const int sender = sharers[share];
    if (world.rank() == sender && sender == 0 && count == parameter.count) return own();  // on a host, part itself
    if (world.rank() == 0) {
      if (!values.defined()) values = at::empty({parameter.count}, part.options().device(at::kCPU));
      const at::Tensor place = values.narrow(0, range.begin - parameter.offset, count);
      if (sender == 0)
        place.copy_(own());
      else
        world.receive(place, sender);
    } else if (world.rank() == sender) {
      world.send(own(), 0);
    }
  }
  return values;
}

ParameterValues WholeValues::of(const at::Tensor& part, int shares) const {
  return [this, part, shares, whole = at::Tensor()](const Parameter& asked) mutable -> const void* {
    const bool writes = model_.mesh.writes();
    whole = at::Tensor();
    for (const Holder& holder : holders_) {
      const Parameter* const here = holder.table.find(asked.name);
      if (here == nullptr || !here->shard.counted) continue;
      const at::Tensor values = part_of(holder, *here, part, shares);
      if (!writes) continue;
      if (is_whole(*here)) {
        whole = values;
        continue;
      }
      if (!whole.defined()) whole = at::empty({asked.count}, values.options());
      for (const ShardRun& run : runs_of(*here))
        whole.narrow(0, run.whole, run.count).copy_(values.narrow(0, run.local, run.count));
    }
    return writes ? host_bytes(whole) : nullptr;
  };
}

void WholeValues::give(const ParameterValues& values) const {
  for (const Parameter& parameter : table_.parameters()) values(parameter);
}

void take_values(const Parameter& parameter, const AdamW::Range& range, const std::byte* whole, std::int64_t bytes,
                 std::byte* out) {
  for (const ShardRun& run : runs_of(parameter)) {
    const std::int64_t first = parameter.offset + run.local;
    const AdamW::Range here = overlap({first, first + run.count}, range);
    std::copy_n(whole + (run.whole + here.begin - first) * bytes, (here.end - here.begin) * bytes,
                out + (here.begin - range.begin) * bytes);
  }
}

}  // namespace espalier
