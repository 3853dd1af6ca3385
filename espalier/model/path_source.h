// A set of rows over the open trunks: row i sees the first P rows of the path, and row j of its own set if and only if
// j <= i < subtree_end[j]. In a layer with a window W, row i sees only rows that are less than W above it, by
// depth along the path. The keys and values of a trunk stay at the top of the path for everything below; a layer with a
// window may keep only the last ones. Depths are then counted from the first row that the path keeps
// (OpenPath::first_row).
//
// Shapes: T rows, P visible rows of the path.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <map>
#include <vector>

#include "espalier/model/kv_source.h"
#include "espalier/model/open_path.h"
#include "espalier/program/step_plan.h"

namespace espalier {

class PathSource final : public KvSource {
 public:
  // `is_trunk`: the path was last opened for these rows, after the P others. subtree_end_T (int32) and depth_T (int32)
  // are on the device; only layers with a window read depth_T. The path must outlive the object. `runs`: of the rows,
  // if some layers are recurrent.
  PathSource(OpenPath& path, std::int64_t path_rows, bool is_trunk, at::Tensor subtree_end_T, at::Tensor depth_T = {},
             std::vector<RowRun> runs = {})
      : path_(path),
        path_rows_(path_rows),
        is_trunk_(is_trunk),
        subtree_end_T_(std::move(subtree_end_T)),
        depth_T_(std::move(depth_T)),
        runs_(std::move(runs)),
        forks_(std::ranges::count_if(runs_, [](const RowRun& run) { return run.fork >= 0; })) {}

  bool keeps(std::int64_t layer) const override { return keeps_in_path(layer) || held_.contains(layer); }
  bool takes_rows(std::int64_t layer) const override { return !keeps_in_path(layer); }
  void hold(std::int64_t layer, const KeysValues& rows) override { held_[layer].rows = rows; }
  void hold_gradients(const Operations& ops, std::int64_t layer, const KeysValues& gradients) override;
  KeysValues kept(std::int64_t layer) const override;
  void leave(const LayerAttention& attention) override;
  OpenPath* path_of_latents() const override { return path_.carries_latents() ? &path_ : nullptr; }
  std::int64_t path_rows() const override { return path_rows_; }
  std::int64_t path_rows_with_own() const override { return is_trunk_ ? path_.rows() : path_rows_; }
  void attend(const LayerAttention& attention, const at::Tensor& attended_RW, const at::Tensor& lse_HR) override;
  std::int64_t states() const override { return forks_; }
  KeysValues gathered(std::int64_t layer) const override;
  void add_gathered(const Operations& ops, std::int64_t layer, const KeysValues& grad_own) const override;
  // Counts as this set's contribution to every trunk that it sees.
  void add_backward(const LayerAttention& attention, const at::Tensor& attended_RW, const at::Tensor& lse_HR,
                    const at::Tensor& grad_attended_RW, const at::Tensor& grad_q_RW,
                    const KeysValues& grad_own) override;

 protected:
  std::vector<StateRun> runs(std::int64_t layer, const at::Tensor& states_FN,
                             const at::Tensor& grad_states_FN) const override;
  void count_runs_backward(std::int64_t layer) override { path_.count_contribution(layer, path_rows_); }

 private:
  bool keeps_in_path(std::int64_t layer) const { return is_trunk_ && path_.keeps_all(layer); }
  AttentionProblem problem(const LayerAttention& attention, const OpenPath::Layer& path) const;

  OpenPath& path_;
  std::int64_t path_rows_;
  bool is_trunk_;
  at::Tensor subtree_end_T_, depth_T_;
  std::vector<RowRun> runs_;
  std::int64_t forks_;
  struct Held {
    KeysValues rows, gradients;
  };
  std::map<std::int64_t, Held> held_;  // by layer
};

}  // namespace espalier
