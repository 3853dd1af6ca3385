#include "espalier/model/shared_states.h"

#include <algorithm>

namespace espalier {

std::vector<StateRun> SharedStates::runs_of(const Leg& leg, std::int64_t layer, const at::Tensor& states_FN,
                                            const at::Tensor& grad_states_FN) const {
  const OpenPath::State above = path_.state_above(layer, path_rows_),
                        own = is_trunk_ ? path_.state_of_top(layer) : OpenPath::State{};
  std::vector<StateRun> out;
  for (std::size_t run = leg.first_run; run < leg.last_run; ++run) {
    const RowRun& of_set = runs_.runs[run];
    StateRun one;
    one.begin = of_set.begin - leg.begin + leg.own, one.end = of_set.end - leg.begin + leg.own;
    one.forks = of_set.fork >= 0;
    const std::int32_t start = of_set.parent < 0 ? -1 : runs_.runs[static_cast<std::size_t>(of_set.parent)].fork;
    one.start_N = start < 0 ? above.state_N : states_FN[start];
    one.end_N = one.forks ? states_FN[of_set.fork] : own.state_N;
    if (grad_states_FN.defined()) {
      one.grad_start_N = start < 0 ? above.grad_state_N : grad_states_FN[start];
      one.grad_end_N = one.forks ? grad_states_FN[of_set.fork] : own.grad_state_N;
    }
    out.push_back(std::move(one));
  }
  return out;
}

std::span<const SharedRuns::Transfer> SharedStates::transfers_of(std::size_t leg) const {
  const auto found = std::ranges::equal_range(runs_.transfers, leg, {}, &SharedRuns::Transfer::leg);
  return {found.begin(), found.end()};
}

void SharedStates::give_states(std::size_t leg, const at::Tensor& states_FN) {
  const auto from = static_cast<int>(runs_.legs[leg].rank);
  for (const SharedRuns::Transfer& transfer : transfers_of(leg))
    if (from == cp_.rank())
      cp_.send(states_FN[transfer.fork], static_cast<int>(transfer.to));
    else if (transfer.to == cp_.rank())
      cp_.receive(states_FN[transfer.fork], from);
}

void SharedStates::give_gradients_back(const Operations& ops, std::size_t leg, const at::Tensor& grad_states_FN) {
  const auto to = static_cast<int>(runs_.legs[leg].rank);
  const at::Tensor received_N = grad_states_FN[runs_.forks];
  for (const SharedRuns::Transfer& transfer : transfers_of(leg)) {
    const at::Tensor sum_N = grad_states_FN[transfer.fork];
    if (transfer.to == cp_.rank()) cp_.send(sum_N, to);
    if (to != cp_.rank()) continue;
    cp_.receive(received_N, static_cast<int>(transfer.to));
    ops.add_scaled(sum_N, received_N, 1, sum_N);
  }
}

void SharedStates::run_states(std::int64_t layer, const at::Tensor& states_FN, const RowsOfRuns& compute) {
  for (std::size_t leg = 0; leg < runs_.legs.size(); ++leg) {
    const Leg& rows = runs_.legs[leg];
    if (rows.rank == cp_.rank()) compute(runs_of(rows, layer, states_FN, {}));
    give_states(leg, states_FN);
  }
  if (!is_trunk_ || layer < left_layers_) return;  // a recomputation finds it in the path
  cp_.broadcast(path_.state_of_top(layer).state_N, static_cast<int>(runs_.legs.back().rank));
  left_layers_ = layer + 1;
}

void SharedStates::run_states_backward(const Operations& ops, std::int64_t layer, const at::Tensor& states_FN,
                                       const at::Tensor& grad_states_FN, const RowsOfRuns& again,
                                       const RowsOfRuns& compute) {
  if (is_trunk_) {
    path_.expect_complete(layer);
    if (const at::Tensor sum_N = path_.state_of_top(layer).grad_state_N; sum_N.defined()) cp_.add_over_ranks(sum_N);
  }
  const auto forking = [&](const Leg& rows) {
    std::vector<StateRun> runs = runs_of(rows, layer, states_FN, {});
    std::erase_if(runs, [](const StateRun& run) { return !run.forks; });
    return runs;
  };
  for (std::size_t leg = 0; leg < runs_.legs.size(); ++leg) {
    if (runs_.legs[leg].rank == cp_.rank()) again(forking(runs_.legs[leg]));
    give_states(leg, states_FN);
  }
  for (std::size_t leg = runs_.legs.size(); leg-- > 0;) {
    give_gradients_back(ops, leg, grad_states_FN);
    if (runs_.legs[leg].rank == cp_.rank()) compute(runs_of(runs_.legs[leg], layer, states_FN, grad_states_FN));
  }
  path_.count_contribution(layer, path_rows_);
}

}  // namespace espalier
