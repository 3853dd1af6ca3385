#include "espalier/plan/tree_cut.h"

#include <algorithm>
#include <deque>

namespace espalier {
namespace {

template <class Number>
std::vector<Number> sums_of_new(const std::vector<Number>& path, const std::vector<Number>& shared) {
  std::vector<Number> sums(path.size() + 1);
  // The difference first: so sums never fall, whatever is rounded.
  for (std::size_t leaf = 0; leaf < path.size(); ++leaf) sums[leaf + 1] = sums[leaf] + (path[leaf] - shared[leaf]);
  return sums;
}

template <class Number>
Number of_part(const std::vector<Number>& path, const std::vector<Number>& sums, TreeCut::Part part) {
  const auto begin = static_cast<std::size_t>(part.begin), end = static_cast<std::size_t>(part.end);
  return path[begin] + (sums[end] - sums[begin + 1]);  // of one leaf exactly its path
}

// Two leaves share the least that neighbours between them share: all of these are on the way to their fork.
template <class Number>
Number of_parts(const std::vector<Number>& path, const std::vector<Number>& shared, const std::vector<Number>& sums,
                std::span<const TreeCut::Part> parts) {
  Number total = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    total += of_part(path, sums, parts[i]);
    if (i > 0) total -= *std::min_element(shared.begin() + parts[i - 1].end, shared.begin() + parts[i].begin + 1);
  }
  return total;
}

}  // namespace

TreeCut::TreeCut(const TreeIndex& index, const CostModel& model, std::int64_t full_rows, double seconds, bool shared) {
  const auto leaves = static_cast<std::size_t>(index.leaves());
  const auto& nodes = index.tree().nodes;
  std::vector<double> node_seconds(nodes.size());  // from the root to its last token
  path_rows_.resize(leaves), path_seconds_.resize(leaves);
  shared_rows_.resize(leaves), shared_seconds_.resize(leaves);
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    node_seconds[i] = model.marginal_seconds(index.own(static_cast<std::int32_t>(i)), full_rows);
    if (nodes[i].parent >= 0) node_seconds[i] += node_seconds[static_cast<std::size_t>(nodes[i].parent)];
  }
  for (std::int32_t leaf = 0; leaf < index.leaves(); ++leaf) {
    const auto at = static_cast<std::size_t>(leaf);
    path_rows_[at] = index.leaf_length(leaf);
    path_seconds_[at] = node_seconds[static_cast<std::size_t>(index.end_node(leaf))];
  }
  if (shared) {
    shared_rows_ = path_rows_, shared_seconds_ = path_seconds_;  // a leaf that ends on the way of the one before
    for (std::size_t i = nodes.size(); i-- > 0;) {               // backwards: the topmost is written last
      const auto leaf = static_cast<std::size_t>(nodes[i].leaf_begin);
      const std::int32_t above = nodes[i].parent;
      shared_rows_[leaf] = above < 0 ? 0 : nodes[static_cast<std::size_t>(above)].end;
      shared_seconds_[leaf] = above < 0 ? 0 : node_seconds[static_cast<std::size_t>(above)];
    }
  }
  new_rows_ = sums_of_new(path_rows_, shared_rows_);
  new_seconds_ = sums_of_new(path_seconds_, shared_seconds_);
  fixed_seconds_ = std::max(0.0, seconds - new_seconds_.back());
}

std::int64_t TreeCut::rows(Part part) const { return of_part(path_rows_, new_rows_, part); }

double TreeCut::seconds(Part part) const { return fixed_seconds_ + of_part(path_seconds_, new_seconds_, part); }

std::int64_t TreeCut::rows(std::span<const Part> parts) const {
  return of_parts(path_rows_, shared_rows_, new_rows_, parts);
}

double TreeCut::seconds(std::span<const Part> parts) const {
  return fixed_seconds_ + of_parts(path_seconds_, shared_seconds_, new_seconds_, parts);
}

double TreeCut::longest_leaf() const { return fixed_seconds_ + *std::ranges::max_element(path_seconds_); }

// least[e], the fewest rows of leaves [0, e), is the minimum over the begin b of the last part of least[b] + rows(b, e)
// = new_rows[e] + (least[b] + path_rows[b] - new_rows[b + 1]). Seconds of (b, e) grow with e and shrink with b, so the
// b that are left form a window that moves on; its minimum is the front of a queue of ascending values.
std::vector<TreeCut::Part> TreeCut::parts(double limit) const {
  const auto leaves = static_cast<std::size_t>(this->leaves());
  std::vector<std::int64_t> least(leaves + 1), value(leaves);
  std::vector<std::int32_t> begin_of(leaves + 1);
  std::deque<std::int32_t> window;
  for (std::int32_t end = 1; end <= this->leaves(); ++end) {
    const std::int32_t last = end - 1;
    const auto at = static_cast<std::size_t>(last);
    value[at] = least[at] + path_rows_[at] - new_rows_[at + 1];
    while (!window.empty() && value[static_cast<std::size_t>(window.back())] > value[at]) window.pop_back();
    window.push_back(last);
    while (window.front() < last && seconds({window.front(), end}) > limit) window.pop_front();
    begin_of[at + 1] = window.front();
    least[at + 1] = value[static_cast<std::size_t>(window.front())] + new_rows_[at + 1];
  }
  std::vector<Part> parts;
  for (std::int32_t end = this->leaves(); end > 0; end = parts.back().begin)
    parts.push_back({begin_of[static_cast<std::size_t>(end)], end});
  std::ranges::reverse(parts);
  return parts;
}

}  // namespace espalier
