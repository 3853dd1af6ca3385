// The source for rows that append to sequences held elsewhere: tokens of prompts, or the newest token of each response.
//
// Every row belongs to one group, groups in order. The rows of a group see the group's path [P] and rows kept in `own`:
// a row kept at r sees own row j iff j <= r < subtree_end[j]. In a layer with a window W it sees only the rows
// that are less than W above it. Keys and values of the group's rows are written to `own` before anything reads them;
// unwritten rows of `own` must hold finite numbers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/device/control_block.h"
#include "espalier/model/kv_source.h"
#include "espalier/model/open_path.h"

namespace espalier {

struct RowGroup {
  std::vector<std::int32_t> own_row;          // ascending: where the key and value of each of the group's rows are kept
  std::span<const std::int32_t> subtree_end;  // one per own row up to the last that is read
  std::span<const std::int32_t> depth;        // of the same rows, where the model has layers with a window
  const OpenPath* own = nullptr;
  const OpenPath* path = nullptr;  // may be `own` where path_rows is 0
  std::int64_t path_rows = 0;      // P

  // For recurrent layers: rows [begin, end) of the group, and the states of all such layers before them (undefined: 0)
  // and after them; both may be the same tensors.
  struct Run {
    std::int64_t begin, end;
    at::Tensor start_N, end_N;
  };
  std::vector<Run> runs;  // of all rows; empty where no layer's rows carry one
};

class GroupSource final : public KvSource {
 public:
  // The next rows of the set. Its pointers must outlive the object.
  void add(RowGroup group) { groups_.push_back({std::move(group), {}, {}, {}, {}}); }
  // Adds the groups to the block, whose hand_over comes later; no group may be added afterwards. output_row: the rows
  // of the set with an output, ascending.
  void add_to(ControlBlock& block, std::span<const std::int32_t> output_row);

  void attend(const LayerAttention& attention, const at::Tensor& attended_RW, const at::Tensor& lse_HR) override;
  std::vector<std::int64_t> query_runs() const override { return queries_; }  // of the groups
  std::vector<StateRun> runs(std::int64_t layer, const at::Tensor&, const at::Tensor&) const override;

 private:
  struct OnDevice {
    RowGroup group;
    at::Tensor own_row_N, subtree_end_T, depth_T;
    at::Tensor output_own_row_N;  // the own rows of the group's outputs
  };

  std::vector<OnDevice> groups_;
  std::vector<std::int64_t> queries_;
};

}  // namespace espalier
