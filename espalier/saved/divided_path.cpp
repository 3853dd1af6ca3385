#include "espalier/saved/divided_path.h"

#include <ATen/core/Tensor.h>

#include "espalier/base/error.h"
#include "espalier/ops/operations.h"

namespace espalier {

DividedPath::DividedPath(const BlockShape& block, std::int64_t path_rows, bool with_gradients, bool latents,
                         at::ScalarType dtype, Group& cp, Arena& arena)
    : ops_(arena.device().operations()),
      cp_(cp),
      arena_(arena),
      dtype_(dtype),
      of_rank_(block, shares(path_rows).most(), with_gradients, latents) {
  const PathBuffers of_ranks(block, cp.size() * shares(path_rows).most(), with_gradients, latents);
  for (int kind = 0; kind < kKinds; ++kind)
    rooms_[static_cast<std::size_t>(kind)].rows_W = take(of_ranks, static_cast<Kind>(kind));
}

at::Tensor DividedPath::take(const PathBuffers& declared, Kind kind) const {
  const BufferList::Place places[] = {declared.first_PW, declared.second_PW, declared.grad_first_PW,
                                      declared.grad_second_PW};
  return arena_.take(declared, places[static_cast<int>(kind)], dtype_);
}

int DividedPath::add(const Member& member) {
  kept_.push_back({member, take(of_rank_, member.kind)});
  return static_cast<int>(kept_.size()) - 1;
}

at::Tensor DividedPath::rows_in_place(const Kept& kept, std::int64_t rank, std::int64_t rows) const {
  return kept.member.rows_PW.slice(0, rank, rows, cp_.size());
}

at::Tensor DividedPath::rows_in_room(const Kept& kept, std::int64_t rank, std::int64_t rows) {
  const PathShares shared = shares(rows);
  return room_of(kept).rows_W.narrow(0, rank * shared.most(), shared.rows_of(rank));
}

std::string DividedPath::name_of(const Kept& kept) const {
  constexpr const char* kNames[] = {"keys", "values", "gradients of keys", "gradients of values"};
  return text_of("path's ", kNames[static_cast<int>(kept.member.kind)], " of layer ", kept.member.layer);
}

void DividedPath::ask(int number, std::int64_t rows) {
  const Kept& kept = kept_.at(static_cast<std::size_t>(number));
  if (kept.member.is_gradient() || rows == 0) return;
  Room& room = room_of(kept);
  const std::int64_t most = shares(rows).most();
  room.member = number;
  room.pending =
      cp_.start_gather(kept.rows_CW.narrow(0, 0, most), room.rows_W.narrow(0, 0, cp_.size() * most), name_of(kept));
}

void DividedPath::bring_back(int number, std::int64_t rows) {
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

void DividedPath::put_away(int number, std::int64_t begin, std::int64_t end) {
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
    if (rows.size(0) < most) ops_.zero(room.rows_W.narrow(0, rank * most + rows.size(0), 1));
  }
  room.member = number;
  room.pending = cp_.start_scatter_sum(room.rows_W.narrow(0, 0, cp_.size() * most), kept.rows_CW.narrow(0, 0, most),
                                       name_of(kept));
}

}  // namespace espalier
