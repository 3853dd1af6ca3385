// A set of rows over the open trunks that the ranks of cp have divided (program/row_shares.h). Each computes the
// queries, keys and values of its rows; keys and values of all rows are gathered, queries stay. The gradients that
// ranks have of them, those that waves added to a trunk's included, are summed once, to the rank that has the row.
//
// Every rank of the rank group calls the same functions, also one without rows. Visibility: path_source.h.
// Shapes: T rows of this rank, S of the set, P rows of the path that they see, J key/value heads, D head size.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/device/arena.h"
#include "espalier/forecast/block_buffers.h"
#include "espalier/model/kv_path.h"
#include "espalier/model/kv_source.h"
#include "espalier/parallel/group.h"
#include "espalier/program/row_shares.h"

namespace espalier {

// On the device, int32.
struct DividedRows {
  at::Tensor row_S;         // of the set: those of rank 0, of rank 1, ...
  at::Tensor own_T;         // those of this rank
  at::Tensor output_own_O;  // of the set: the row of each output of this rank
  at::Tensor counted_T;     // 0, 1, ... T-1
};

class DividedSource final : public KvSource {
 public:
  // `is_trunk`: the rows are those that the path was last opened for. The arguments must outlive the object; `dtype`
  // is that of activations. subtree_end_S (int32) lies on the device, and so does depth_S (int32), which
  // only layers with a window read.
  DividedSource(KvPath& path, std::int64_t path_rows, bool is_trunk, at::Tensor subtree_end_S, at::Tensor depth_S,
                const RowShares& shares, const DividedRows& rows, const BlockShape& block, at::ScalarType dtype,
                Group& cp, Arena& arena);

  void attend(const LayerAttention& attention, const at::Tensor& attended_RW, const at::Tensor& lse_HR) override;
  void add_backward(const LayerAttention& attention, const at::Tensor& attended_RW, const at::Tensor& lse_HR,
                    const at::Tensor& grad_attended_RW, const at::Tensor& grad_q_RW,
                    const KeysValues& grad_own) override;

 private:
  // In a buffer of ranks, the first rows of the one at `place`: [rows, J*D] and [rows, J*Dv].
  KeysValues parts_of(const at::Tensor& whole, std::int64_t place, std::int64_t rows) const;
  at::Tensor set_rows_of(std::int64_t rank) const;
  void gather(const LayerAttention& attention, const at::Tensor& part, const at::Tensor& whole,
              const KeysValues& set) const;
  void add_to_owners(const LayerAttention& attention, const KeysValues& grad_set, const at::Tensor& part,
                     const at::Tensor& whole, const KeysValues& grad_own) const;
  AttentionProblem problem(const LayerAttention& attention, const KeysValues& set, const KvPath::Layer& path) const;

  KvPath& path_;
  std::int64_t path_rows_;
  bool is_trunk_;
  at::Tensor subtree_end_S_, depth_S_;
  RowShares shares_;
  const DividedRows& rows_;
  BlockShape block_;
  at::ScalarType dtype_;
  Group& cp_;
  Arena& arena_;
  std::int64_t kept_layers_ = 0;  // of a trunk: whose keys and values are in the path
};

}  // namespace espalier
