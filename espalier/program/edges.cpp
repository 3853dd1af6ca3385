// Loss edges of a set of rows, made when it runs.
#include <algorithm>

#include "espalier/base/error.h"
#include "espalier/program/step_plan.h"

namespace espalier {

std::vector<RowRun> runs_of(const RowSet& set) {
  std::vector<RowRun> runs;
  std::vector<std::int32_t> subtree_end, open;  // of runs; numbers of those above, innermost last
  std::int32_t depth = 0;                       // behind the run before
  for (const RowSegment& segment : set.segments) {
    while (!open.empty() && subtree_end[static_cast<std::size_t>(open.back())] <= segment.row) open.pop_back();
    const std::int32_t end = segment.row + segment.end - segment.begin;
    if (!open.empty() && open.back() + 1 == std::ssize(runs) && runs.back().end == segment.row &&
        depth == segment.begin && subtree_end.back() == segment.subtree_end) {
      runs.back().end = end;
    } else {
      const std::int32_t parent = open.empty() ? -1 : open.back();
      if (parent >= 0) runs[static_cast<std::size_t>(parent)].fork = 0;
      open.push_back(static_cast<std::int32_t>(runs.size()));
      runs.push_back({segment.row, end, parent, -1});
      subtree_end.push_back(segment.subtree_end);
    }
    depth = segment.end;
  }
  std::int32_t forks = 0;
  for (RowRun& run : runs)
    if (run.fork == 0) run.fork = forks++;
  return runs;
}

namespace {

void add_edges(const RowSegment& segment, std::int32_t depth, std::int32_t index, const Rollout& rollout,
               bool all_logprobs, std::vector<LossEdge>& edges) {
  const std::int32_t predicting = depth - rollout.first_predicting(), columns = rollout.columns();
  if (predicting < 0 || predicting >= rollout.predicting()) return;
  const std::int32_t row = segment.row + depth - segment.begin, first = predicting * columns;
  for (std::int32_t position = first; position < first + columns; ++position) {
    if (!all_logprobs && !rollout.loss_mask[position]) continue;
    const std::int32_t target = rollout.target(position);
    edges.push_back({row, target, index, position});
  }
}

}  // namespace

std::vector<LossEdge> edges_of(const RowSet& set, std::span<const Rollout> rollouts, bool all_logprobs) {
  std::vector<LossEdge> edges;
  edges.reserve(static_cast<std::size_t>(set.outputs));
  std::vector<std::int32_t> through;
  for (const RowSegment& segment : set.segments) {
    through.assign(set.rollouts.begin() + segment.first, set.rollouts.begin() + segment.last);
    std::sort(through.begin(), through.end());
    std::int32_t depth = segment.end;  // no row before the first that predicts has edges
    for (std::int32_t index : through) depth = std::min(depth, rollouts[index].first_predicting());
    for (depth = std::max(depth, segment.begin); depth < segment.end; ++depth)
      for (std::int32_t index : through) add_edges(segment, depth, index, rollouts[index], all_logprobs, edges);
  }
  return edges;
}

namespace {

// The first of the edges of a row that are alike.
template <class Alike>
std::vector<LossEdge> first_of_each(const std::vector<LossEdge>& edges, const Alike& alike) {
  std::vector<LossEdge> found;
  std::size_t row_begin = 0;  // first of the found edges of this row
  for (const LossEdge& edge : edges) {
    if (found.empty() || found.back().row != edge.row) row_begin = found.size();
    const bool known = std::any_of(found.begin() + static_cast<std::ptrdiff_t>(row_begin), found.end(),
                                   [&](const LossEdge& first) { return alike(first, edge); });
    if (!known) found.push_back(edge);
  }
  return found;
}

}  // namespace

std::vector<LossEdge> outputs_of(const std::vector<LossEdge>& edges, std::span<const Rollout> rollouts,
                                 bool by_temperature) {
  return first_of_each(edges, [&](const LossEdge& a, const LossEdge& b) {
    return !by_temperature || rollouts[a.rollout].temperature == rollouts[b.rollout].temperature;
  });
}

std::vector<LossEdge> distributions_of(const std::vector<LossEdge>& edges, std::span<const Rollout> rollouts) {
  const auto kept_of = [&](const LossEdge& edge) {
    return rollouts[edge.rollout].kept_sets.at(static_cast<std::size_t>(edge.position));
  };
  return first_of_each(edges, [&](const LossEdge& a, const LossEdge& b) {
    return rollouts[a.rollout].temperature == rollouts[b.rollout].temperature &&
           std::ranges::equal(kept_of(a), kept_of(b));
  });
}

}  // namespace espalier
