#include "espalier/saved/sharded_path.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "espalier/base/error.h"
#include "espalier/ops/operations.h"

namespace espalier {

ShardedPath::ShardedPath(const BufferSizes& sizes, std::int64_t path_rows, bool with_gradients, bool latents,
                         at::ScalarType dtype, Group& cp, Arena& arena)
    : ops_(arena.device().operations()),
      cp_(cp),
      arena_(arena),
      dtype_(dtype),
      sizes_(sizes),
      path_rows_(path_rows),
      with_gradients_(with_gradients),
      latents_(latents) {
  const auto of_ranks = [&](const LayerShape& layer) { return buffers(layer, cp_.size() * shares(path_rows_).most()); };
  const LayerShape& largest =
      *std::ranges::max_element(sizes.shape.layer, {}, [&](const LayerShape& layer) { return of_ranks(layer).peak(); });
  const PathBuffers declared = of_ranks(largest);
  for (const BufferList::Place place : declared.rows_PW) rooms_.push_back({arena_.take(declared, place, dtype_)});
}

int ShardedPath::add(const Member& member) {
  const PathBuffers declared = buffers(sizes_.shape.at(member.layer), shares(path_rows_).most());
  at::Tensor rows_CW;
  if (member.number < declared.rows_PW.size()) rows_CW = arena_.take(declared, declared.rows_PW[member.number], dtype_);
  kept_.push_back({member, rows_CW});
  return static_cast<int>(kept_.size()) - 1;
}

at::Tensor ShardedPath::rows_in_place(const Kept& kept, std::int64_t rank, std::int64_t rows) const {
  return kept.member.rows_PW.slice(0, rank, rows, cp_.size());
}

// The first rows of the room, as wide as the member's.
at::Tensor ShardedPath::in_room(const Kept& kept, std::int64_t first, std::int64_t rows) {
  const std::int64_t width = kept.member.rows_PW.size(1);
  return room_of(kept).rows_W.view({-1}).narrow(0, first * width, rows * width).view({rows, width});
}

at::Tensor ShardedPath::rows_in_room(const Kept& kept, std::int64_t rank, std::int64_t rows) {
  const PathShares shared = shares(rows);
  return in_room(kept, rank * shared.most(), shared.rows_of(rank));
}

std::string ShardedPath::name_of(const Kept& kept) const {
  return text_of("path's ", kept.member.name, " of layer ", kept.member.layer);
}

void ShardedPath::ask(int number, std::int64_t rows) {
  const Kept& kept = kept_.at(static_cast<std::size_t>(number));
  if (kept.member.is_gradient() || rows == 0) return;
  Room& room = room_of(kept);
  const std::int64_t most = shares(rows).most();
  room.member = number;
  room.pending = cp_.start_gather(kept.rows_CW.narrow(0, 0, most), in_room(kept, 0, cp_.size() * most), name_of(kept));
}

void ShardedPath::bring_back(int number, std::int64_t rows) {
  if (rows == 0) return;
  const Kept& kept = kept_.at(static_cast<std::size_t>(number));
  Room& room = room_of(kept);
  if (kept.member.is_gradient()) {
    if (room.member == number) room.pending.wait();
    ops_.zero(kept.member.rows_PW.narrow(0, 0, rows));
    ops_.convert(kept.rows_CW.narrow(0, 0, shares(rows).rows_of(cp_.rank())), rows_in_place(kept, cp_.rank(), rows));
    return;
  }
  if (room.member != number) ask(number, rows);
  room.pending.wait();
  room.member = -1;
  for (std::int64_t rank = 0; rank < cp_.size(); ++rank)
    ops_.convert(rows_in_room(kept, rank, rows), rows_in_place(kept, rank, rows));
}

void ShardedPath::put_away(int number, std::int64_t begin, std::int64_t end) {
  const Kept& kept = kept_.at(static_cast<std::size_t>(number));
  if (begin == end) return;
  if (!kept.member.is_gradient()) {
    const std::int64_t first = shares(begin).rows_of(cp_.rank()), count = shares(end).rows_of(cp_.rank()) - first;
    ops_.convert(rows_in_place(kept, cp_.rank(), end).narrow(0, first, count), kept.rows_CW.narrow(0, first, count));
    return;
  }
  Room& room = room_of(kept);
  room.pending.wait();
  const std::int64_t most = shares(end).most();
  for (std::int64_t rank = 0; rank < cp_.size(); ++rank) {
    const at::Tensor rows = rows_in_room(kept, rank, end);
    ops_.convert(rows_in_place(kept, rank, end), rows);
    if (rows.size(0) < most) ops_.zero(in_room(kept, rank * most + rows.size(0), 1));
  }
  room.member = number;
  room.pending =
      cp_.start_scatter_sum(in_room(kept, 0, cp_.size() * most), kept.rows_CW.narrow(0, 0, most), name_of(kept));
}

}  // namespace espalier
