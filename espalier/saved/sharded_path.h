// The rows of a path, and their gradients, sharded over cp (--path-state divide, latents-divide).
//
// Rank r of R keeps rows r, R + r, 2 R + r, ... of every layer, so that any number of first rows is split evenly.
// The layer in use is gathered into one buffer that all layers share; the next layer is gathered into a room meanwhile.
// The gradients that ranks add to the layer in use are reduced to the ranks that keep the rows while the next layer
// computes. These are collectives: every rank of cp goes through the same layers in the same order
// (program/joint_order.h).
//
// Shapes: P rows of capacity, C = ceil(P / R) rows of one rank, W numbers of a row of one kind (Mixer::path_kinds).
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "espalier/model/block_buffers.h"
#include "espalier/model/path_keeper.h"
#include "espalier/parallel/group.h"
#include "espalier/program/row_shares.h"

namespace espalier {

class ShardedPath final : public PathKeeper {
 public:
  // Allocates the buffers in the arena, and this rank's part of every member. The arguments must outlive the object;
  // `dtype` is the dtype of activations.
  ShardedPath(const BufferSizes& sizes, std::int64_t path_rows, bool with_gradients, bool latents, at::ScalarType dtype,
              Group& cp, Arena& arena);

  bool one_place() const override { return true; }
  int add(const Member& member) override;
  // The three functions throw CommunicationError.
  void ask(int member, std::int64_t rows) override;
  // For gradients: this rank's part in its place, and 0 elsewhere.
  void bring_back(int member, std::int64_t rows) override;
  // For gradients: reduces over ranks, because all of the first `end` rows have changed.
  void put_away(int member, std::int64_t begin, std::int64_t end) override;

 private:
  struct Kept {
    Member member;
    at::Tensor rows_CW;  // of this rank
  };
  // Buffers in flight of one kind: one member at a time.
  struct Room {
    at::Tensor rows_W;  // [R * C, W]: rows of rank 0, then of rank 1, ...
    int member = -1;
    Pending pending = {};
  };

  // The buffers of a layer for `rows` rows.
  PathBuffers buffers(const LayerShape& layer, std::int64_t rows) const {
    return {{sizes_, layer}, rows, with_gradients_, latents_};
  }
  Room& room_of(const Kept& kept) { return rooms_[kept.member.number]; }
  PathShares shares(std::int64_t rows) const { return {rows, cp_.size()}; }
  // The part of the path's first `rows` rows that `rank` keeps, in memory order.
  at::Tensor rows_in_place(const Kept& kept, std::int64_t rank, std::int64_t rows) const;
  at::Tensor in_room(const Kept& kept, std::int64_t first, std::int64_t rows);
  at::Tensor rows_in_room(const Kept& kept, std::int64_t rank, std::int64_t rows);
  std::string name_of(const Kept& kept) const;

  const Operations& ops_;
  Group& cp_;
  Arena& arena_;
  at::ScalarType dtype_;
  BufferSizes sizes_;
  std::int64_t path_rows_;
  bool with_gradients_, latents_;
  std::vector<Kept> kept_;
  std::vector<Room> rooms_;
};

}  // namespace espalier
