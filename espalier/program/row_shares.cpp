#include "espalier/program/row_shares.h"

#include <algorithm>

namespace espalier {

std::int64_t RowShares::most() const {
  std::int64_t most = 0;
  for (std::int64_t rank = 0; rank < ranks_; ++rank) most = std::max(most, rows_of(rank));
  return most;
}

RowSet share_of(const RowSet& set, const RowShares& shares, std::int64_t rank) {
  RowSet own;
  own.rollouts = set.rollouts;
  for (const RowShares::Piece& piece : shares.pieces(rank))
    for (const RowSegment& segment : set.segments) {
      const auto begin = std::max(static_cast<std::int32_t>(piece.begin), segment.row);
      const auto end = std::min(static_cast<std::int32_t>(piece.end), segment.row + segment.end - segment.begin);
      if (begin >= end) continue;
      RowSegment part = segment;
      part.begin = segment.begin + begin - segment.row;
      part.end = segment.begin + end - segment.row;
      part.row = own.rows;
      own.rows += end - begin;
      own.segments.push_back(part);
    }
  return own;
}

}  // namespace espalier
