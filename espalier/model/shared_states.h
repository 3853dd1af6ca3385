// The states of a set's rows that ranks of cp share: each rank computes the runs of its rows in turn and gives the
// states behind them to the ranks whose runs go on from there; a backward gives their gradients back. A trunk's last
// state goes to every rank.
//
// Every rank of the group calls the same functions, even without rows. Shapes: F states of the set and room for one
// (SharedRuns::forks + 1), N numbers of a state.
#pragma once

#include <span>

#include "espalier/model/kv_source.h"
#include "espalier/model/open_path.h"
#include "espalier/parallel/group.h"
#include "espalier/program/shared_runs.h"

namespace espalier {

class SharedStates {
 public:
  // The arguments must outlive the object; `is_trunk` as in PathSource.
  SharedStates(OpenPath& path, std::int64_t path_rows, bool is_trunk, SharedRuns runs, Group& cp)
      : path_(path), path_rows_(path_rows), is_trunk_(is_trunk), runs_(std::move(runs)), cp_(cp) {}

  std::int64_t states() const { return runs_.forks + 1; }
  // As KvSource's functions of these names.
  void run_states(std::int64_t layer, const at::Tensor& states_FN, const RowsOfRuns& compute);
  void run_states_backward(const Operations& ops, std::int64_t layer, const at::Tensor& states_FN,
                           const at::Tensor& grad_states_FN, const RowsOfRuns& again, const RowsOfRuns& compute);

 private:
  using Leg = SharedRuns::Leg;

  // This rank's runs of a leg, in its own rows.
  std::vector<StateRun> runs_of(const Leg& leg, std::int64_t layer, const at::Tensor& states_FN,
                                const at::Tensor& grad_states_FN) const;
  std::span<const SharedRuns::Transfer> transfers_of(std::size_t leg) const;
  void give_states(std::size_t leg, const at::Tensor& states_FN);
  void give_gradients_back(const Operations& ops, std::size_t leg, const at::Tensor& grad_states_FN);

  OpenPath& path_;
  std::int64_t path_rows_;
  bool is_trunk_;
  SharedRuns runs_;
  Group& cp_;
  std::int64_t left_layers_ = 0;  // for a trunk: layers whose last state every rank has
};

}  // namespace espalier
