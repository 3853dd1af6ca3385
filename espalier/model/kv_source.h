// The source of the keys and values that the rows of one forward attend to, and the place for their own.
//
// The block computes queries, keys and values; a source runs the attention. There are sources for rows over the open
// trunks (model/path_source.h) and for rows that a sampler appends to its sequences (generate/group_source.h).
//
// Shapes: T rows, R rows with a query (all, or in a narrow last block those with an output), H query heads, J key/value
// heads, D head size.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/metrics/timer.h"
#include "espalier/ops/operations.h"

namespace espalier {

// Keys and values of some rows, or their gradients, [rows, J*D] or [rows, J, D].
struct KeysValues {
  at::Tensor k, v;
};

// Rows carried as latents (mixers/latent_attention), for sources that expand them to keys and values.
struct PathLatents {
  at::Tensor latent_PC, rotary_PK, grad_latent_PC, grad_rotary_PK;
};
// Keys and values of rows, [P, J, D] and [P, J, Dv], and their gradients in the accumulator dtype.
struct PathHeads {
  at::Tensor k, v, grad_k, grad_v;
};
// Buffers for blocks of B rows: the latents' projection to heads, W wide; gradients of latents; and sums in the
// accumulator dtype.
struct LatentBlock {
  at::Tensor kv_BW, grad_latent_BC, sum_latent_BC, sum_rotary_BK;
};

// A layer of latent attention whose rows give their latents to a source.
class LatentLayer {
 public:
  virtual ~LatentLayer() = default;

  // Overwrites `to` with the rows' normed latents and their rotated shared keys.
  virtual void give(const KeysValues& to) const = 0;
  // Overwrites keys and values of rows with those that their latents expand to, in blocks.
  virtual void expand(const LatentBlock& block, const PathLatents& rows, const PathHeads& expanded) const = 0;
  // From the gradients of these keys and values: adds to the gradients of the latents and shared keys, and of the
  // weights. product_NC: scratch as in add_linear_grad_weight.
  virtual void add_expand_backward(const LatentBlock& block, const PathHeads& expanded, const PathLatents& rows,
                                   const at::Tensor& product_NC) const = 0;
  // The same of the path's first `rows` rows.
  virtual void add_expand_path_backward(std::int64_t rows, const at::Tensor& product_NC) const = 0;
};

// The arguments of one layer's attention.
struct LayerAttention {
  const Operations& ops;
  Timer* timer;  // times the attention; may be null
  std::int64_t layer, head_dim;
  at::Tensor output_row_R;         // the row of each query, ascending; undefined: every row has one
  at::Tensor q_RW;                 // [R, H*D], rotated
  KeysValues own;                  // keys and values of the T rows, keys rotated; undefined if a source expands latents
  std::int64_t window = 0;         // the most rows that a row sees, itself included; 0: all above it
  double scale = 0, soft_cap = 0;  // as in AttentionProblem
  const LatentLayer* latents = nullptr;  // of rows that give their latents; null: others
  std::int64_t source = layer;           // the layer whose keys and values these are (Mixer::source)
};

class OpenPath;

// The work of a recurrent layer on the rows of runs.
using RowsOfRuns = std::function<void(const std::vector<StateRun>& runs)>;

class KvSource {
 public:
  virtual ~KvSource() = default;

  // True if all of the rows' keys and values in this layer outlive the forward. If so, they are written to `kept`, [T,
  // J*D]; otherwise `kept` is undefined.
  virtual bool keeps(std::int64_t /*layer*/) const { return false; }
  virtual KeysValues kept(std::int64_t) const { return {}; }
  // For layers that later layers read (LayerShape::is_read_later): the source may take buffers of the pass for the rows
  // of its set, where it has no other place for all of them. It then keeps them there, and their gradients in a
  // backward, which begin with what rows below the set added.
  virtual bool takes_rows(std::int64_t /*layer*/) const { return false; }
  virtual void hold(std::int64_t /*layer*/, const KeysValues& /*rows*/) {}
  virtual void hold_gradients(const Operations&, std::int64_t /*layer*/, const KeysValues& /*gradients*/) {}
  // Called after every `attend`: where `keeps` is false, copies the keys and values that outlive the forward, if any.
  virtual void leave(const LayerAttention&) {}

  // The path that carries the visible rows as latents (mixers/latent_attention), and the number of rows seen; null: it
  // carries keys and values. `keeps` then says that the rows' own latents outlive the forward.
  virtual OpenPath* path_of_latents() const { return nullptr; }
  virtual std::int64_t path_rows() const { return 0; }
  // The same with the rows of the set if they are a trunk's.
  virtual std::int64_t path_rows_with_own() const { return 0; }
  // True if the rows are some of a set that ranks of cp share. In latent attention such a source takes the rows'
  // latents, and it computes keys and values from all ranks' latents. Its add_backward then does everything up to the
  // latents: grad_own, overwritten, is of the normed latents [T, C] and of the rotated shared keys [T, K].
  virtual bool divides() const { return false; }

  // Overwrites attended [R, H*D] and lse [H, R] (natural logarithm; scratch without a backward).
  virtual void attend(const LayerAttention& attention, const at::Tensor& attended_RW, const at::Tensor& lse_HR) = 0;
  // The number of queries of each run, if the last `attend` wrote lse by runs of queries, [H, queries of a run] one
  // after another. Empty: all queries are one run.
  virtual std::vector<std::int64_t> query_runs() const { return {}; }

  // For recurrent layers, which have states instead of keys and values: the number F of states that are used within the
  // set, and the layer's runs of rows with the states around them, which `compute` gets once or in turns. The states
  // are in states_FN, and their gradients in a backward in grad_states_FN (zeroed before). The gradient of the state
  // that the set leaves for later sets is complete then. `again` gets the runs whose last states other runs begin with,
  // before `compute` gets any. Errors: InternalError if a contribution is missing.
  virtual std::int64_t states() const { return 0; }
  virtual void run_states(std::int64_t layer, const at::Tensor& states_FN, const RowsOfRuns& compute);
  virtual void run_states_backward(const Operations&, std::int64_t layer, const at::Tensor& states_FN,
                                   const at::Tensor& grad_states_FN, const RowsOfRuns& again,
                                   const RowsOfRuns& compute);

  // The gradients that later rows added to the kept keys and values, [T, J, D]; undefined if nothing is kept. Errors:
  // InternalError if a contribution is missing.
  virtual KeysValues gathered(std::int64_t) const { return {}; }
  // The same for rows that `leave` copied: adds to the gradients of the rows' own keys and values, which are 0.
  virtual void add_gathered(const Operations&, std::int64_t /*layer*/, const KeysValues& /*grad_own*/) const {}
  // Takes the results of `attend`. Overwrites grad_q; adds to the gradients of the rows' own keys and values, and of
  // those they attended to. Called once per layer, even without queries. Errors: InternalError for a forward-only
  // source.
  virtual void add_backward(const LayerAttention&, const at::Tensor& /*attended_RW*/, const at::Tensor& /*lse_HR*/,
                            const at::Tensor& /*grad_attended_RW*/, const at::Tensor& /*grad_q_RW*/,
                            const KeysValues& /*grad_own*/) {
    ESPALIER_INTERNAL(false, "a backward over keys and values that are only read");
  }

 protected:
  // All runs of a recurrent layer, whose rows are all of this rank, and the count of their contribution.
  virtual std::vector<StateRun> runs(std::int64_t, const at::Tensor& /*states_FN*/,
                                     const at::Tensor& /*grad_states_FN*/) const {
    ESPALIER_INTERNAL(false, "rows without states");
    return {};
  }
  virtual void count_runs_backward(std::int64_t) {}
};

}  // namespace espalier
