// Keys and values of a path, and their gradients, divided over the ranks of cp (--path-state divide).
//
// Rank r of R keeps rows r, R + r, 2 R + r, ... of every layer, so that the first rows of a path, however many, are
// divided evenly. A layer that is used is gathered into the one place that all layers share, the next one meanwhile
// into a room; gradients that ranks have added there are summed to those who keep the rows while the next layer is
// computed. These are collectives: every rank of cp goes through the same layers, in the same order
// (program/joint_order.h).
//
// Shapes: P rows that the path has room for, C = ceil(P / R) of a rank, W elements of a row's keys, or values.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <vector>

#include "espalier/forecast/block_buffers.h"
#include "espalier/model/path_keeper.h"
#include "espalier/parallel/group.h"
#include "espalier/program/row_shares.h"

namespace espalier {

class DividedPath final : public PathKeeper {
 public:
  // Allocates the buffers in the arena, and this rank's part of every member. The arguments must outlive the
  // object; `dtype` is that of activations.
  DividedPath(const BlockShape& block, std::int64_t path_rows, bool with_gradients, at::ScalarType dtype, Group& cp,
              Arena& arena);

  bool one_place() const override { return true; }
  int add(const Member& member) override;
  // Errors of the three: CommunicationError.
  void ask(int member, std::int64_t rows) override;
  // For gradients: this rank's part, in its place, and 0 elsewhere.
  void bring_back(int member, std::int64_t rows) override;
  // For gradients: the sum over ranks, since all of the first `end` rows have changed.
  void put_away(int member, std::int64_t begin, std::int64_t end) override;

 private:
  struct Kept {
    Member member;
    at::Tensor rows_CW;  // of this rank
  };
  // Buffers in flight of one kind: one member at a time.
  struct Room {
    at::Tensor rows_W;  // [R * C, W]: of rank 0, of rank 1, ...
    int member = -1;
    Pending pending = {};
  };

  at::Tensor take(const PathBuffers& declared, Kind kind) const;
  Room& room_of(const Kept& kept) { return rooms_[static_cast<std::size_t>(kept.member.kind)]; }
  PathShares shares(std::int64_t rows) const { return {rows, cp_.size()}; }
  // The first `rows` rows of the path that `rank` keeps, as they lie in memory.
  at::Tensor rows_in_place(const Kept& kept, std::int64_t rank, std::int64_t rows) const;
  at::Tensor rows_in_room(const Kept& kept, std::int64_t rank, std::int64_t rows);
  std::string name_of(const Kept& kept) const;

  const Operations& ops_;
  Group& cp_;
  Arena& arena_;
  at::ScalarType dtype_;
  PathBuffers of_rank_;
  std::vector<Kept> kept_;
  std::array<Room, kKinds> rooms_;
};

}  // namespace espalier
