#include "espalier/train/whole_values.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "espalier/device/host_values.h"

namespace espalier {
namespace {

// Sends return before they are received and hold copies until then, a bounded number of them: small ones.
constexpr std::int64_t kSentBytes = std::int64_t{512} << 10;

void for_each_sent(const at::Tensor& values, auto&& call) {
  const std::int64_t most = kSentBytes / values.element_size();
  for (std::int64_t begin = 0; begin < values.numel(); begin += most)
    call(values.narrow(0, begin, std::min(most, values.numel() - begin)));
}

bool is_whole(const Parameter& parameter) { return parameter.shard.dim < 0; }

}  // namespace

WholeValues::WholeValues(const ModelState& model, std::function<void()> between)
    : model_(model), between_(std::move(between)), table_(model.shape, Parameters::trained) {
  const Degrees& degrees = model.mesh.degrees;
  for (int rank = 0; rank < model.mesh.world.size(); ++rank) {
    ParameterTable table(LocalShape(model.shape, degrees, place_of(rank, degrees)), Parameters::trained);
    if (std::ranges::any_of(table.parameters(), [](const Parameter& p) { return p.shard.first; }))
      holders_.push_back({rank, std::move(table)});
  }
}

std::vector<WholeValues::Piece> WholeValues::pieces_of(const Holder& holder, const Parameter& parameter,
                                                       int shares) const {
  const Degrees& degrees = model_.mesh.degrees;
  std::vector<Piece> pieces;
  if (const Unit* const unit = holder.table.unit_of(parameter)) {
    const Axis axis = unit->experts ? Axis::expert_replicas : Axis::replicas;
    for (const int rank : ranks_along(axis, holder.rank, degrees))
      pieces.push_back({rank, holder.table.kept(parameter, static_cast<std::int64_t>(pieces.size()))});
    return pieces;
  }
  const Kept kept = holder.table.kept(parameter);
  if (shares == 1) return {{holder.rank, kept}};
  for (const int rank : ranks_along(Axis::dp, holder.rank, degrees)) {
    const int share = static_cast<int>(pieces.size());
    pieces.push_back({rank, kept_within(kept, AdamW::range_of(holder.table.size(), shares, share))});
  }
  return pieces;
}

at::Tensor WholeValues::part_of(const Holder& holder, const Parameter& parameter, const at::Tensor& part,
                                int shares) const {
  Group& world = model_.mesh.world;
  Device& device = model_.decoder.device();
  at::Tensor values;
  for (const auto& [rank, kept] : pieces_of(holder, parameter, shares)) {
    if (kept.count == 0) continue;
    const auto own = [&, &kept = kept] { return device.to_host(part.narrow(0, kept.place, kept.count)); };
    if (world.rank() == rank && rank == 0 && kept.count == parameter.count) return own();  // on a host, part itself
    if (world.rank() == 0) {
      if (!values.defined()) values = at::empty({parameter.count}, part.options().device(at::kCPU));
      const at::Tensor place = values.narrow(0, kept.first, kept.count);
      if (rank == 0)
        place.copy_(own());
      else
        for_each_sent(place, [&, &from = rank](const at::Tensor& piece) { world.receive(piece, from); });
    } else if (world.rank() == rank) {
      for_each_sent(own(), [&](const at::Tensor& piece) { world.send(piece, 0); });
    }
  }
  return values;
}

ParameterValues WholeValues::of(const at::Tensor& part, int shares) const {
  return [this, part, shares](const Parameter& asked) -> const void* {
    if (between_) between_();
    const bool writes = model_.mesh.writes();
    at::Tensor& whole = whole_;
    whole = at::Tensor();
    for (const Holder& holder : holders_) {
      const Parameter* const here = holder.table.find(asked.name);
      if (here == nullptr || !here->shard.first) continue;
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

void take_values(const Parameter& parameter, const Kept& kept, const std::byte* whole, std::int64_t bytes,
                 std::byte* out) {
  for (const ShardRun& run : runs_of(parameter, kept))
    std::copy_n(whole + run.whole * bytes, run.count * bytes, out + run.local * bytes);
}

Kept kept_within(const Kept& kept, const AdamW::Range& range) {
  const std::int64_t begin = std::max(kept.place, range.begin), end = std::min(kept.place + kept.count, range.end);
  if (end <= begin) return {};
  return {kept.first + begin - kept.place, end - begin, begin - range.begin};
}

}  // namespace espalier
