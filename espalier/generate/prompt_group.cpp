#include "espalier/generate/prompt_group.h"

#include <ATen/ATen.h>

#include <numeric>

#include "espalier/ops/operations.h"

namespace espalier {
namespace {

// What the group takes: a row of width M, and K and V of every layer in two stores.
std::int64_t bytes_taken(const ModelShape& shape, at::ScalarType dtype, std::int64_t prompt_rows,
                         std::int64_t response_rows) {
  const auto taken = [&](std::int64_t count) {
    return arena_bytes(count * static_cast<std::int64_t>(c10::elementSize(dtype)));
  };
  const std::int64_t width = shape.kv_heads * shape.head_dim;
  return taken(shape.hidden) + 2 * shape.layers * (taken(prompt_rows * width) + taken(response_rows * width));
}

}  // namespace

PromptGroup::PromptGroup(const ModelShape& shape, at::ScalarType dtype, std::int64_t prompt_rows,
                         std::int64_t responses, std::int64_t longest, Device& device)
    : layers_(shape.layers),
      prompt_rows_(prompt_rows),
      packing_(responses, longest),
      memory_(bytes_taken(shape, dtype, prompt_rows, packing_.capacity()), device),
      last_hidden_M_(memory_.take({shape.hidden}, dtype)),
      prompt_(shape, prompt_rows, dtype, false, memory_),
      responses_(shape, packing_.capacity(), dtype, false, memory_),
      prompt_end_(static_cast<std::size_t>(prompt_rows), static_cast<std::int32_t>(prompt_rows)),
      has_window_(shape.window > 0),
      prompt_depth_(has_window_ ? static_cast<std::size_t>(prompt_rows) : 0) {
  std::iota(prompt_depth_.begin(), prompt_depth_.end(), 0);
}

RowGroup PromptGroup::append_prompt(std::int64_t begin, std::int64_t end) const {
  RowGroup group;
  group.own_row.resize(static_cast<std::size_t>(end - begin));
  std::iota(group.own_row.begin(), group.own_row.end(), static_cast<std::int32_t>(begin));
  group.subtree_end = std::span(prompt_end_).first(static_cast<std::size_t>(end));
  if (has_window_) group.depth = std::span(prompt_depth_).first(static_cast<std::size_t>(end));
  group.own = group.path = &prompt_;
  return group;
}

RowGroup PromptGroup::append_step() {
  packing_.make_room(moves_);
  for (std::int64_t layer = 0; layer < layers_ && !moves_.empty(); ++layer) {
    const KvPath::Layer own = responses_.path(layer, packing_.capacity());
    for (const RowPacking::Move& move : moves_) {
      memory_.device().operations().move_rows(own.k, move.from, move.to, move.count);
      memory_.device().operations().move_rows(own.v, move.from, move.to, move.count);
    }
  }
  packing_.grow();
  RowGroup group;
  for (const RowPacking::Run& run : packing_.runs())
    for (std::int32_t row = run.count - run.more; row < run.count; ++row) group.own_row.push_back(run.begin + row);
  group.subtree_end = packing_.subtree_end();
  if (has_window_) {
    // Rows between runs are nobody's: a run that has ended leaves them.
    response_depth_.assign(group.subtree_end.size(), static_cast<std::int32_t>(prompt_rows_));
    for (const RowPacking::Run& run : packing_.runs())
      for (std::int32_t row = run.begin; row < run.end; ++row)
        response_depth_[static_cast<std::size_t>(row)] += row - run.begin;
    group.depth = response_depth_;
  }
  group.own = &responses_;
  group.path = &prompt_;
  group.path_rows = prompt_rows_;
  return group;
}

}  // namespace espalier
