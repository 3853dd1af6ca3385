// Keys and values that the rows of one forward attend to besides each other, and the place of their own.
//
// The block computes queries, keys and values; a source runs the attention. A set of rows over the open trunks is one
// (model/path_source.h), the rows that a sampler appends to its sequences another (generate/group_source.h).
//
// Shapes: T rows, R rows with a query (all, or in a narrow last block those with an output), H query heads, J key/value
// heads, D head size.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/observe/timer.h"
#include "espalier/ops/operations.h"

namespace espalier {

// Keys and values of some rows, or their gradients, [rows, J*D] or [rows, J, D].
struct KeysValues {
  at::Tensor k, v;
};

// One layer's attention, as its block asks for it.
struct LayerAttention {
  const Operations& ops;
  Timer* timer;  // books the attention; may be null
  std::int64_t layer, head_dim;
  at::Tensor output_row_R;         // the row of each query, ascending; undefined: every row has one
  at::Tensor q_RW;                 // [R, H*D], rotated
  KeysValues own;                  // of the T rows, keys rotated
  std::int64_t window = 0;         // rows that a row sees at most, itself included; 0: all above it
  double scale = 0, soft_cap = 0;  // as AttentionProblem's
};

class KvSource {
 public:
  virtual ~KvSource() = default;

  // Whether the rows' keys and values outlive the forward: they are then written to `kept`, [T, J*D], which is
  // undefined otherwise.
  virtual bool keeps() const { return false; }
  virtual KeysValues kept(std::int64_t) const { return {}; }

  // Overwrites attended [R, H*D] and lse [H, R] (natural logarithm), which is scratch where there is no backward.
  virtual void attend(const LayerAttention& attention, const at::Tensor& attended_RW, const at::Tensor& lse_HR) = 0;
  // Where the last `attend` wrote lse for runs of queries, [H, queries of a run] one behind the other: how many queries
  // each has. Empty: all are one run.
  virtual std::vector<std::int64_t> query_runs() const { return {}; }

  // Where rows carry a state in place of keys and values: how many runs of the rows leave one for others of the set;
  // and the runs of the layer, with the states around them. States that the set leaves for itself are in states_FN.
  // With grad_states_FN (of a backward, zeroed) their gradients are there; what came to the state that the set leaves
  // for later sets is complete. Errors: InternalError before the last of it.
  virtual std::int64_t forks() const { return 0; }
  virtual std::vector<StateRun> runs(std::int64_t, const at::Tensor& /*states_FN*/,
                                     const at::Tensor& /*grad_states_FN*/) const {
    ESPALIER_INTERNAL(false, "rows without states");
    return {};
  }
  // Called once a layer, after the gradients of the runs' states were added.
  virtual void count_runs_backward(std::int64_t) {}

  // The gradients that later rows added to what was kept, [T, J, D]; undefined where nothing is kept. Errors:
  // InternalError before the last of them.
  virtual KeysValues gathered(std::int64_t) const { return {}; }
  // With what `attend` gave. Overwrites grad_q; adds to the gradients of the rows' own keys and values, and to those of
  // what they attended to. Called once a layer, also where there is no query. Errors: InternalError for a source that
  // is only read.
  virtual void add_backward(const LayerAttention&, const at::Tensor& /*attended_RW*/, const at::Tensor& /*lse_HR*/,
                            const at::Tensor& /*grad_attended_RW*/, const at::Tensor& /*grad_q_RW*/,
                            const KeysValues& /*grad_own*/) {
    ESPALIER_INTERNAL(false, "a backward over keys and values that are only read");
  }
};

}  // namespace espalier
