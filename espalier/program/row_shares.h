// The rows of a set divided over the ranks of cp, which share the same trees.
//
// Rank r of R has the pieces r and 2R-1-r of 2R neighbouring ones, so that under a causal mask all have nearly the same
// work. Attention needs the keys and values of all rows, which are gathered; queries stay.
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
  // Ascending; together the rows of a rank, in its order.
  std::array<Piece, 2> pieces(std::int64_t rank) const { return {piece(rank), piece(2 * ranks_ - 1 - rank)}; }

  std::int64_t ranks() const { return ranks_; }
  std::int64_t rows() const { return rows_; }
  std::int64_t rows_of(std::int64_t rank) const { return pieces(rank)[0].size() + pieces(rank)[1].size(); }
  std::int64_t most() const;  // rows of the rank with most

 private:
  Piece piece(std::int64_t index) const { return {rows_ * index / (2 * ranks_), rows_ * (index + 1) / (2 * ranks_)}; }

  std::int64_t rows_, ranks_;
};

// The first rows of a path, as ranks of cp keep them where they divide it: rank r of R has rows r, R + r, 2 R + r, ...
struct PathShares {
  std::int64_t rows, ranks;
  std::int64_t rows_of(std::int64_t rank) const { return (rows + ranks - 1 - rank) / ranks; }
  std::int64_t most() const { return rows_of(0); }
};

// The segments of a rank's rows of a set, numbered from 0. Properties of the whole set (outputs,
// pairs, ends of subtrees) are absent from a share.
RowSet share_of(const RowSet& set, const RowShares& shares, std::int64_t rank);

// A rank's part in an item under cp: the whole, its share, or nothing (PlanItem::cp_rank).
inline bool runs_on(const PlanItem& item, std::int64_t rank) {
  return item.cp_rank == PlanItem::kEveryRank || item.cp_rank == rank;
}
inline bool is_divided(const PlanItem& item, std::int64_t ranks) {
  return ranks > 1 && item.cp_rank == PlanItem::kEveryRank;
}

}  // namespace espalier
