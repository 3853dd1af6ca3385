#include "espalier/phase/item_input.h"

#include <algorithm>

namespace espalier {
namespace {

void add_segment(ModelInput& input, const RowSegment& segment, const Rollout& rollout) {
  for (std::int32_t depth = segment.begin; depth < segment.end; ++depth) {
    input.id.push_back(rollout.token_at(depth));
    input.position.push_back(depth);
    input.subtree_end.push_back(segment.subtree_end);
  }
}

// The experts that rows are to choose: those that are repeated, or, of a policy, those that rollouts record, where any
// rollout of the set has some.
void add_routes(ModelInput& input, const RowSet& set, std::span<const Rollout> batch, const ModelShape& shape,
                const moe::ChosenExperts* repeated) {
  const auto records = [&](const RowSegment& segment) { return batch[segment.rollout].routes.tokens > segment.begin; };
  const bool from_rollouts = !shape.value_head && std::any_of(set.segments.begin(), set.segments.end(), records);
  if (repeated == nullptr && !from_rollouts) return;
  const auto k = static_cast<std::size_t>(shape.experts_per_token), T = input.id.size();
  input.recorded.assign(static_cast<std::size_t>(shape.expert_layers()) * T * k, -1);
  std::size_t row = 0;
  for (const RowSegment& segment : set.segments)
    for (std::int32_t depth = segment.begin; depth < segment.end; ++depth, ++row) {
      const std::uint16_t* route =
          repeated ? repeated->at(segment.rollout, depth) : batch[segment.rollout].route_at(depth).data();
      for (std::size_t at = row * k; route != nullptr && at < input.recorded.size(); at += T * k, route += k)
        if (*route != RecordedRoutes::kFree) std::copy(route, route + k, input.recorded.begin() + at);
    }
}

// Those of the output rows in the last layer of experts, which are all that run there in a narrow last block.
void add_routes_of_outputs(ModelInput& input, const ModelShape& shape) {
  if (input.recorded.empty() || input.routes_all_rows || !shape.has_experts(shape.layers - 1)) return;
  const std::int64_t k = shape.experts_per_token;
  const auto last = input.recorded.end() - input.rows() * k;
  for (const std::int32_t row : input.output_row)
    input.recorded_output.insert(input.recorded_output.end(), last + row * k, last + (row + 1) * k);
}

// One output row per (row, temperature) among the edges, which are ordered that way first.
std::vector<double> add_outputs(ItemInput& out, std::span<const Rollout> batch, bool critic) {
  std::vector<double> temperatures;
  auto temperature_of = [&](const LossEdge& edge) { return critic ? 1.0 : batch[edge.rollout].temperature; };
  std::stable_sort(out.edges.begin(), out.edges.end(), [&](const LossEdge& a, const LossEdge& b) {
    return a.row != b.row ? a.row < b.row : temperature_of(a) < temperature_of(b);
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

ItemInput::ItemInput(const PlanItem& item, std::span<const Rollout> batch, const ModelShape& shape, bool all_logprobs,
                     const moe::LoadAccounting* accounting, const moe::ChoiceRecord& choices, Device& device) {
  model.path_rows = item.path_rows;
  model.in_path = item.kind == ItemKind::trunk;
  for (const RowSegment& segment : item.set.segments) add_segment(model, segment, batch[segment.rollout]);
  if (accounting != nullptr) owners = owners_of(item.set);
  model.routes_all_rows = accounting != nullptr && accounting->needs_all_rows();
  model.keeps_choices = shape.experts > 0 && (accounting != nullptr || choices.written != nullptr);
  edges = edges_of(item.set, batch, all_logprobs);
  const std::vector<double> temperatures = add_outputs(*this, batch, shape.value_head);
  add_routes(model, item.set, batch, shape, choices.repeated);
  add_routes_of_outputs(model, shape);
  std::vector<HeadEdge> of_head;
  for (std::size_t e = 0; e < edges.size(); ++e) of_head.push_back({output[e], edges[e].target});
  ControlBlock block;
  model.add_to(block);
  head_edges.add_to(block, temperatures, of_head, shape.vocabulary);
  block.hand_over(device);
}

}  // namespace espalier
