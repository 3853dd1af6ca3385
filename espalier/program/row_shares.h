// The rows of a set sharded over cp. Ranks of cp share the same trees.
//
// The set is cut into 2R contiguous pieces, and rank r of R has the pieces r and 2R-1-r, so that under a causal mask
// all ranks have nearly the same work. Keys and values of all rows are gathered for attention; queries stay.
#pragma once

#include <array>
#include <cstdint>

#include "espalier/program/step_plan.h"

namespace espalier {

// Shares of rows [0, rows). A rank may have none.
class RowShares {
 public:
  RowShares(std::int64_t rows, std::int64_t ranks) : rows_(rows), ranks_(ranks) {}

  struct Piece {
    std::int64_t begin, end;
    std::int64_t size() const { return end - begin; }
  };
  // The rows of a rank in its order: two pieces, ascending.
  std::array<Piece, 2> pieces(std::int64_t rank) const { return {piece(rank), piece(2 * ranks_ - 1 - rank)}; }

  std::int64_t ranks() const { return ranks_; }
  std::int64_t rows() const { return rows_; }
  std::int64_t rows_of(std::int64_t rank) const { return pieces(rank)[0].size() + pieces(rank)[1].size(); }
  std::int64_t most() const;  // the largest number of rows of a rank

 private:
  Piece piece(std::int64_t index) const { return {rows_ * index / (2 * ranks_), rows_ * (index + 1) / (2 * ranks_)}; }

  std::int64_t rows_, ranks_;
};

// The rows of a path sharded over cp: rank r of R keeps rows r, R + r, 2 R + r, ...
struct PathShares {
  std::int64_t rows, ranks;
  std::int64_t rows_of(std::int64_t rank) const { return (rows + ranks - 1 - rank) / ranks; }
  std::int64_t most() const { return rows_of(0); }
};

// The segments of a rank's rows of a set, their rows numbered from 0. Outputs, pairs and forks are 0, and subtree_end
// stays a row of the whole set.
RowSet share_of(const RowSet& set, const RowShares& shares, std::int64_t rank);

// True if a rank of cp runs an item or its share of the item's rows (PlanItem::cp_rank).
inline bool runs_on(const PlanItem& item, std::int64_t rank) {
  return item.cp_rank == PlanItem::kEveryRank || item.cp_rank == rank;
}
inline bool is_sharded(const PlanItem& item, std::int64_t ranks) {
  return ranks > 1 && item.cp_rank == PlanItem::kEveryRank;
}

}  // namespace espalier
