#include "espalier/model/kv_source.h"

namespace espalier {

void KvSource::run_states(std::int64_t layer, const at::Tensor& states_FN, const RowsOfRuns& compute) {
  compute(runs(layer, states_FN, {}));
}

void KvSource::run_states_backward(const Operations&, std::int64_t layer, const at::Tensor& states_FN,
                                   const at::Tensor& grad_states_FN, const RowsOfRuns& again,
                                   const RowsOfRuns& compute) {
  const std::vector<StateRun> all = runs(layer, states_FN, grad_states_FN);
  std::vector<StateRun> forks;
  for (const StateRun& run : all)
    if (run.forks) forks.push_back(run);
  again(forks);
  compute(all);
  count_runs_backward(layer);
}

}  // namespace espalier
