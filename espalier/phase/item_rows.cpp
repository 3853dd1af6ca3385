#include "espalier/phase/item_rows.h"

#include <algorithm>

#include "espalier/base/mutation.h"

namespace espalier {
namespace {

void add_segment(Rows& rows, const RowSegment& segment, const Rollout& rollout) {
  for (std::int32_t depth = segment.begin; depth < segment.end; ++depth) {
    rows.id.push_back(rollout.token_at(depth));
    rows.position.push_back(ESPALIER_MUTATION(positions_restarted) ? depth - rows.path_rows : depth);
    rows.subtree_end.push_back(segment.subtree_end);
  }
}

// The experts that every row is to choose: those that are repeated, or, of a policy, those that rollouts record, where
// any rollout of the set has some; and where its own choices are to be written.
void add_routes(Rows& rows, const RowSet& set, std::span<const Rollout> batch, bool critic,
                const moe::ChoiceRecord& choices) {
  const auto recorded = [&](const RowSegment& segment) { return batch[segment.rollout].routes.tokens > segment.begin; };
  const bool from_rollouts = !critic && std::any_of(set.segments.begin(), set.segments.end(), recorded);
  for (const RowSegment& segment : set.segments)
    for (std::int32_t depth = segment.begin; depth < segment.end; ++depth) {
      if (choices.repeated != nullptr)
        rows.route.push_back(choices.repeated->at(segment.rollout, depth));
      else if (from_rollouts)
        rows.route.push_back(batch[segment.rollout].route_at(depth).data());
      if (choices.written != nullptr) rows.chosen.push_back(choices.written->at(segment.rollout, depth));
    }
}

// One output row per (row, temperature) among the edges, which are ordered that way first.
void add_outputs(ItemRows& out, std::span<const Rollout> batch, bool critic) {
  auto temperature_of = [&](const LossEdge& edge) {
    return critic || ESPALIER_MUTATION(temperature_ignored) ? 1.0 : batch[edge.rollout].temperature;
  };
  std::stable_sort(out.edges.begin(), out.edges.end(), [&](const LossEdge& a, const LossEdge& b) {
    return a.row != b.row ? a.row < b.row : temperature_of(a) < temperature_of(b);
  });
  for (const LossEdge& edge : out.edges) {
    const double temperature = temperature_of(edge);
    Rows& rows = out.rows;
    if (rows.output_row.empty() || rows.output_row.back() != edge.row || out.temperature.back() != temperature) {
      rows.output_row.push_back(edge.row);
      rows.output_position.push_back(rows.position[edge.row]);
      out.temperature.push_back(temperature);
    }
    out.head_edges.push_back({static_cast<std::int32_t>(rows.output_row.size()) - 1, edge.target});
  }
}

// The rollouts of every segment's rows.
void add_owners(Rows& rows, const RowSet& set, moe::LoadAccounting& accounting) {
  rows.accounting = &accounting;
  for (const RowSegment& segment : set.segments) {
    const auto owners =
        std::span<const std::int32_t>(set.rollouts)
            .subspan(static_cast<std::size_t>(segment.first), static_cast<std::size_t>(segment.last - segment.first));
    rows.owners.push_back({segment.row, segment.row + segment.end - segment.begin, owners});
  }
}

}  // namespace

ItemRows make_item_rows(const PlanItem& item, std::span<const Rollout> batch, bool all_logprobs, bool critic,
                        moe::LoadAccounting* accounting, const moe::ChoiceRecord& choices) {
  ItemRows out;
  out.rows.path_rows = item.path_rows;
  out.rows.in_path = item.kind == ItemKind::trunk;
  for (const RowSegment& segment : item.set.segments) add_segment(out.rows, segment, batch[segment.rollout]);
  add_routes(out.rows, item.set, batch, critic, choices);
  if (ESPALIER_MUTATION(mask_leak))
    for (auto& end : out.rows.subtree_end) end = std::min(end + 1, item.set.rows);
  if (accounting != nullptr) add_owners(out.rows, item.set, *accounting);
  out.edges = edges_of(item.set, batch, all_logprobs);
  if (ESPALIER_MUTATION(boundary_edge_doubled) && item.path_rows > 0 && !out.edges.empty())
    out.edges.push_back(out.edges.front());
  add_outputs(out, batch, critic);
  return out;
}

}  // namespace espalier
