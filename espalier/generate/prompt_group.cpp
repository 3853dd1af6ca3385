#include "espalier/generate/prompt_group.h"

#include <ATen/core/Tensor.h>

#include <numeric>

#include "espalier/device/scalar_type.h"
#include "espalier/model/block_buffers.h"
#include "espalier/ops/operations.h"

namespace espalier {
namespace {

BufferSizes sizes_of(const ModelShape& shape, at::ScalarType dtype) { return {shape, element_bytes(dtype), false}; }

// The bytes that the group takes: a row of width M, what layers leave for each row in two stores, and states.
std::int64_t bytes_taken(const ModelShape& shape, at::ScalarType dtype, std::int64_t prompt_rows,
                         std::int64_t response_rows, std::int64_t responses) {
  const BufferSizes sizes = sizes_of(shape, dtype);
  std::int64_t bytes = StateBuffers(sizes, false).peak() * (1 + responses) +
                       arena_bytes(shape.hidden * static_cast<std::int64_t>(c10::elementSize(dtype)));
  for (const LayerShape& layer : shape.layer)
    for (const std::int64_t rows : {prompt_rows, response_rows})
      bytes += PathBuffers({sizes, layer}, rows, false).peak();
  return bytes;
}

}  // namespace

PromptGroup::PromptGroup(const ModelShape& shape, at::ScalarType dtype, std::int64_t prompt_rows,
                         std::int64_t responses, std::int64_t longest, Device& device)
    : layers_(shape.layers()),
      prompt_rows_(prompt_rows),
      packing_(responses, longest),
      states_(shape.states()),
      memory_(bytes_taken(shape, dtype, prompt_rows, packing_.capacity(), responses), device),
      last_hidden_M_(memory_.take({shape.hidden}, dtype)),
      prompt_(shape, prompt_rows, dtype, false, memory_),
      responses_(shape, packing_.capacity(), dtype, false, memory_),
      prompt_end_(static_cast<std::size_t>(prompt_rows), static_cast<std::int32_t>(prompt_rows)),
      has_window_(shape.window() > 0),
      prompt_depth_(has_window_ ? static_cast<std::size_t>(prompt_rows) : 0) {
  std::iota(prompt_depth_.begin(), prompt_depth_.end(), 0);
  if (states_ == 0) return;
  const StateBuffers states(sizes_of(shape, dtype), false);
  prompt_N_ = memory_.take(states, states.states_N, dtype);
  for (std::int64_t i = responses - 1; i >= 0; --i) {
    response_N_.push_back(memory_.take(states, states.states_N, dtype));
    free_.push_back(static_cast<std::size_t>(i));
  }
}

void PromptGroup::take_rows(const PromptGroup& other, std::int64_t rows) {
  for (std::int64_t layer = 0; layer < layers_; ++layer) {
    const std::vector<at::Tensor> from = other.prompt_.rows_of(layer), to = prompt_.rows_of(layer);
    for (std::size_t kind = 0; kind < to.size(); ++kind)
      if (to[kind].defined())
        memory_.device().operations().convert(from[kind].narrow(0, 0, rows), to[kind].narrow(0, 0, rows));
  }
}

void PromptGroup::add(std::int64_t response) {
  packing_.add(response);
  if (states_ == 0) return;
  place_of_[response] = free_.back();
  free_.pop_back();
}

void PromptGroup::remove(std::int64_t response) {
  packing_.remove(response);
  if (states_ == 0) return;
  free_.push_back(place_of_.at(response));
  place_of_.erase(response);
}

bool PromptGroup::keep_first(std::int64_t response, std::int64_t rows) {
  if (states_ == 0) packing_.keep_first(response, rows);
  return states_ == 0;
}

RowGroup PromptGroup::append_prompt(std::int64_t begin, std::int64_t end) const {
  RowGroup group;
  group.own_row.resize(static_cast<std::size_t>(end - begin));
  std::iota(group.own_row.begin(), group.own_row.end(), static_cast<std::int32_t>(begin));
  group.subtree_end = std::span(prompt_end_).first(static_cast<std::size_t>(end));
  if (has_window_) group.depth = std::span(prompt_depth_).first(static_cast<std::size_t>(end));
  group.own = group.path = &prompt_;
  if (states_ > 0) group.runs = {{0, end - begin, begin == 0 ? at::Tensor() : prompt_N_, prompt_N_}};
  return group;
}

RowGroup PromptGroup::append_step() {
  packing_.make_room(moves_);
  for (std::int64_t layer = 0; layer < layers_ && !moves_.empty(); ++layer) {
    for (const at::Tensor& rows : responses_.rows_of(layer))
      for (const RowPacking::Move& move : moves_)
        memory_.device().operations().move_rows(rows, move.from, move.to, move.count);
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
  std::int64_t first = 0;
  for (const RowPacking::Run& run : packing_.runs()) {
    if (states_ == 0 || run.more == 0) continue;
    const at::Tensor& own_N = response_N_[place_of_.at(run.owner)];
    group.runs.push_back({first, first + run.more, run.count == run.more ? prompt_N_ : own_N, own_N});
    first += run.more;
  }
  group.own = &responses_;
  group.path = &prompt_;
  group.path_rows = prompt_rows_;
  return group;
}

}  // namespace espalier
