#include "espalier/execute/item_input.h"

#include <algorithm>
#include <numeric>

#include "espalier/program/window_rows.h"
#include "espalier/shape/path_leaves.h"

namespace espalier {
namespace {

void add_segment(ModelInput& input, const RowSegment& segment, const Rollout& rollout) {
  for (std::int32_t depth = segment.begin; depth < segment.end; ++depth) {
    input.id.push_back(rollout.token_at(depth));
    input.position.push_back(depth);
  }
}

std::vector<std::int32_t> subtree_ends(const RowSet& set) {
  std::vector<std::int32_t> ends;
  for (const RowSegment& segment : set.segments)
    ends.insert(ends.end(), static_cast<std::size_t>(segment.end - segment.begin), segment.subtree_end);
  return ends;
}

// Along the path, counted from its row `first`.
std::vector<std::int32_t> depths(const RowSet& set, std::int64_t first) {
  std::vector<std::int32_t> depths;
  for (const RowSegment& segment : set.segments)
    for (std::int64_t depth = segment.begin; depth < segment.end; ++depth)
      depths.push_back(static_cast<std::int32_t>(depth - first));
  return depths;
}

std::vector<std::int32_t> set_rows(const RowShares& shares, std::int64_t rank) {
  std::vector<std::int32_t> rows;
  for (const RowShares::Piece& piece : shares.pieces(rank))
    for (std::int64_t row = piece.begin; row < piece.end; ++row) rows.push_back(static_cast<std::int32_t>(row));
  return rows;
}

// Where the rows of a divided set stand in it.
void add_sharded(ControlBlock& block, const RowShares& shares, std::int64_t rank,
                 const std::vector<std::int32_t>& output_row, ShardedRows& sharded) {
  std::vector<std::int32_t> all, outputs;
  for (std::int64_t other = 0; other < shares.ranks(); ++other)
    for (const std::int32_t row : set_rows(shares, other)) all.push_back(row);
  const std::vector<std::int32_t> own = set_rows(shares, rank);
  for (const std::int32_t row : output_row) outputs.push_back(own[static_cast<std::size_t>(row)]);
  std::vector<std::int32_t> counted(own.size());
  std::iota(counted.begin(), counted.end(), 0);
  block.add(all, sharded.row_S);
  block.add(own, sharded.own_T);
  block.add(outputs, sharded.output_own_O);
  block.add(counted, sharded.counted_T);
}

// The experts that rows are given: those chosen in another run, or, of a policy, those that rollouts record, where any
// rollout of the set has some.
void add_given(ModelInput& input, const RowSet& set, std::span<const Rollout> rollouts, const LocalShape& local,
               const moe::ChosenExperts* chosen) {
  const auto records = [&](const RowSegment& segment) {
    return rollouts[segment.rollout].recorded_experts.tokens > segment.begin;
  };
  const bool from_rollouts =
      !local.whole().value_head && std::any_of(set.segments.begin(), set.segments.end(), records);
  if (chosen == nullptr && !from_rollouts) return;
  const auto k = static_cast<std::size_t>(local.whole().experts_per_token), T = input.id.size();
  const std::size_t before = k * static_cast<std::size_t>(local.expert_layers_before());
  input.given.assign(static_cast<std::size_t>(local.own().expert_layers()) * T * k, -1);
  std::size_t row = 0;
  for (const RowSegment& segment : set.segments)
    for (std::int32_t depth = segment.begin; depth < segment.end; ++depth, ++row) {
      const std::uint16_t* experts =
          chosen ? chosen->at(segment.rollout, depth) : rollouts[segment.rollout].experts_at(depth).data();
      if (experts == nullptr) continue;
      experts += before;
      for (std::size_t at = row * k; at < input.given.size(); at += T * k, experts += k)
        if (*experts != RecordedExperts::kFree) std::copy(experts, experts + k, input.given.begin() + at);
    }
}

// Adds the given experts of the output rows in the last layer of experts; a narrow last block runs these rows alone.
void add_given_of_outputs(ModelInput& input, const ModelShape& shape) {
  if (input.given.empty() || input.all_rows_choose || !shape.has_experts(shape.layers() - 1)) return;
  const std::int64_t k = shape.experts_per_token;
  const auto last = input.given.end() - input.rows() * k;
  for (const std::int32_t row : input.output_row)
    input.given_output.insert(input.given_output.end(), last + row * k, last + (row + 1) * k);
}

// The tokens that an edge's token was drawn from; empty: the whole vocabulary.
std::span<const std::int32_t> kept_of(const LossEdge& edge, std::span<const Rollout> rollouts) {
  return rollouts[edge.rollout].kept_sets.at(static_cast<std::size_t>(edge.position));
}

// One output row per (row, temperature) among the edges, which are ordered that way first, then by kept set.
std::vector<double> add_outputs(ItemInput& out, std::span<const Rollout> rollouts, bool critic) {
  std::vector<double> temperatures;
  auto temperature_of = [&](const LossEdge& edge) { return critic ? 1.0 : rollouts[edge.rollout].temperature; };
  std::stable_sort(out.edges.begin(), out.edges.end(), [&](const LossEdge& a, const LossEdge& b) {
    if (a.row != b.row) return a.row < b.row;
    const double of_a = temperature_of(a), of_b = temperature_of(b);
    if (of_a != of_b || critic) return of_a < of_b;
    return std::ranges::lexicographical_compare(kept_of(a, rollouts), kept_of(b, rollouts));
  });
  for (const LossEdge& edge : out.edges) {
    const double temperature = temperature_of(edge);
    ModelInput& input = out.model;
    if (input.output_row.empty() || input.output_row.back() != edge.row || temperatures.back() != temperature) {
      input.output_row.push_back(edge.row);
      input.output_position.push_back(input.position[edge.row]);
      temperatures.push_back(temperature);
    }
    out.output.push_back(static_cast<std::int32_t>(input.output_row.size()) - 1);
  }
  return temperatures;
}

// The rollouts of every segment's model.
std::vector<moe::RowOwners> owners_of(const RowSet& set) {
  std::vector<moe::RowOwners> owners;
  for (const RowSegment& segment : set.segments) {
    const auto rollouts =
        std::span<const std::int32_t>(set.rollouts)
            .subspan(static_cast<std::size_t>(segment.first), static_cast<std::size_t>(segment.last - segment.first));
    owners.push_back({segment.row, segment.row + segment.end - segment.begin, rollouts});
  }
  return owners;
}

}  // namespace

ItemInput::ItemInput(const PlanItem& item, std::span<const Rollout> rollouts, const LocalShape& local,
                     bool all_logprobs, const moe::LoadAccounting* accounting, const moe::ChoiceRecord& choices,
                     Device& device, const Group& cp)
    : shares(is_sharded(item, cp.size()) ? std::optional(RowShares(item.set.rows, cp.size())) : std::nullopt),
      share(shares ? share_of(item.set, *shares, cp.rank()) : RowSet{}),
      rows(shares ? share : item.set) {
  const ModelShape& shape = local.whole();
  for (const RowSegment& segment : rows.segments) add_segment(model, segment, rollouts[segment.rollout]);
  if (accounting != nullptr) owners = owners_of(rows);
  model.all_rows_choose = accounting != nullptr && accounting->all_rows_choose();
  model.keeps_choices = shape.experts > 0 && (accounting != nullptr || choices.written != nullptr);
  edges = edges_of(rows, rollouts, all_logprobs);
  if (shares) set_edges = edges_of(item.set, rollouts, all_logprobs);
  const std::vector<double> temperatures = add_outputs(*this, rollouts, shape.value_head);
  add_given(model, rows, rollouts, local, choices.given);
  add_given_of_outputs(model, local.own());
  std::vector<HeadEdge> of_head;
  for (std::size_t e = 0; e < edges.size(); ++e)
    of_head.push_back(
        {output[e], edges[e].target, shape.value_head ? std::span<const std::int32_t>{} : kept_of(edges[e], rollouts)});
  ControlBlock block;
  model.add_to(block);
  block.add(subtree_ends(item.set), subtree_end_S);
  const std::int64_t first_row = keeps_windows(shape, cp.size()) ? first_window_row(item.path_rows, shape.window()) : 0;
  if (shape.window() > 0) block.add(depths(item.set, first_row), depth_S);
  if (shares) add_sharded(block, *shares, cp.rank(), model.output_row, sharded);
  head_edges.add_to(block, temperatures, of_head, shape.vocabulary);
  block.hand_over(device);
}

}  // namespace espalier
