#include "espalier/generate/group_source.h"

#include <ATen/core/Tensor.h>

namespace espalier {

void GroupSource::add_to(ControlBlock& block, std::span<const std::int32_t> output_row) {
  std::int64_t first_row = 0;
  auto output = output_row.begin();
  for (OnDevice& one : groups_) {
    const std::vector<std::int32_t>& own_row = one.group.own_row;
    const std::int64_t end = first_row + static_cast<std::int64_t>(own_row.size());
    std::vector<std::int32_t> of_outputs;
    for (; output != output_row.end() && *output < end; ++output)
      of_outputs.push_back(own_row[static_cast<std::size_t>(*output - first_row)]);
    block.add(own_row, one.own_row_N);
    block.add(one.group.subtree_end, one.subtree_end_T);
    if (!one.group.depth.empty()) block.add(one.group.depth, one.depth_T);
    block.add(of_outputs, one.output_own_row_N);
    first_row = end;
  }
}

// One call for each group that has queries, after its keys and values are where the group keeps them.
void GroupSource::attend(const LayerAttention& a, const at::Tensor& attended_RW, const at::Tensor& lse_HR) {
  const std::int64_t heads = a.q_RW.size(1) / a.head_dim;
  std::int64_t first_row = 0, first_query = 0;
  queries_.clear();
  for (const OnDevice& one : groups_) {
    const at::Tensor& query_row = a.output_row_R.defined() ? one.output_own_row_N : one.own_row_N;
    const std::int64_t rows = one.own_row_N.size(0), queries = query_row.size(0);
    const OpenPath::Layer own = one.group.own->path(a.source, one.subtree_end_T.size(0));
    if (a.source == a.layer) {
      a.ops.scatter(a.own.k.narrow(0, first_row, rows), one.own_row_N, own.k);
      a.ops.scatter(a.own.v.narrow(0, first_row, rows), one.own_row_N, own.v);
    }
    const OpenPath::Layer path = one.group.path->path(a.source, one.group.path_rows);
    const TimedPart timed(a.timer, part::kAttention);
    a.ops.attention({a.head_dim, a.q_RW.narrow(0, first_query, queries), own.k, own.v, path.k, path.v, query_row,
                     one.subtree_end_T, a.window, one.depth_T, a.scale, a.soft_cap},
                    attended_RW.narrow(0, first_query, queries),
                    lse_HR.view({-1}).narrow(0, first_query * heads, queries * heads));
    first_row += rows;
    first_query += queries;
    queries_.push_back(queries);
  }
}

std::vector<StateRun> GroupSource::runs(std::int64_t layer, const at::Tensor&, const at::Tensor&) const {
  std::vector<StateRun> out;
  std::int64_t first_row = 0;
  for (const OnDevice& one : groups_) {
    for (const RowGroup::Run& run : one.group.runs)
      out.push_back({.begin = first_row + run.begin,
                     .end = first_row + run.end,
                     .start_N = one.group.own->state_in(run.start_N, layer),
                     .end_N = one.group.own->state_in(run.end_N, layer),
                     .grad_start_N = {},
                     .grad_end_N = {}});
    first_row += static_cast<std::int64_t>(one.group.own_row.size());
  }
  return out;
}

}  // namespace espalier
