// Cuts a prefix tree into parts for several ranks. Each rank also runs the rows above its part.
//
// Parts are runs [begin, end) of PrefixTree::leaf_order. A part has the rows of the union of its rollouts' paths, so a
// cut before leaf k repeats the rows that leaves k - 1 and k share:
//   rows(begin, end) = length(begin) + sum over k in (begin, end) of length(k) - shared(k)
// Predicted seconds follow the same formula, with a node's seconds in place of its rows.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/forecast/cost_model.h"
#include "espalier/plan/tree_index.h"

namespace espalier {

class TreeCut {
 public:
  struct Part {
    std::int32_t begin, end;  // leaves
    bool operator==(const Part&) const = default;
  };

  // `seconds`: of the whole tree alone. Seconds that do not depend on rows are counted for every rank with a part.
  // `full_rows`: the rows of a full wave, at whose rate rows are weighed (CostModel::marginal_seconds).
  // `shared`: false under --schedule dense, where every rollout runs all of its rows and a cut repeats none.
  TreeCut(const TreeIndex& index, const CostModel& model, std::int64_t full_rows, double seconds, bool shared);

  std::int32_t leaves() const { return static_cast<std::int32_t>(path_rows_.size()); }
  std::int64_t rows(Part part) const;
  double seconds(Part part) const;
  // The seconds of the longest rollout alone, the lower bound of any part that contains it.
  double longest_leaf() const;

  // The parts with the fewest rows in total such that no part exceeds `limit` seconds, except single rollouts that
  // exceed it alone. In order. O(leaves) time.
  std::vector<Part> parts(double limit) const;

  // The rows of several parts on one rank, ascending; common rows count once.
  std::int64_t rows(std::span<const Part> parts) const;
  double seconds(std::span<const Part> parts) const;

 private:
  // By leaf: rows from the root to its last token; and the rows it shares with the previous leaf.
  std::vector<std::int64_t> path_rows_, shared_rows_;
  std::vector<double> path_seconds_, shared_seconds_;
  // Prefix sums of path - shared.
  std::vector<std::int64_t> new_rows_;
  std::vector<double> new_seconds_;
  double fixed_seconds_ = 0;
};

}  // namespace espalier
