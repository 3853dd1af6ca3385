// Floating-point operations of a set of rows (mathematics, section 9).
//
// Per row 2 x (weights in matrices), per visible (query, key) pair of a layer 4 H D. Backward: 2 x for matrices
// (gradients of inputs and of weights; of held matrices 1 x), 2.5 x for attention; layers below the first one that
// trains have none. The last layer's query, attention, output and MLP, the final norm and the head run for output rows
// (rows with edges) only; its K and V for all rows. A last layer of experts runs all rows where their choices are
// wanted. Where rows carry a state: 6 dk dv per row and value head, whatever the depth. T rows, O output rows, H query
// heads, J key/value heads, D head size, M width, F inner width, L layers, V vocabulary.
#pragma once

#include <cstdint>

#include "espalier/plan/item_state.h"
#include "espalier/plan/model_shape.h"
#include "espalier/plan/step_kind.h"

namespace espalier {

// The work of a row set. The row at depth d sees d+1 rows, so pairs = sum of (d+1) over the rows; in a
// layer with a window W it sees min(d+1, W).
struct Work {
  std::int64_t rows = 0, pairs = 0;                        // all rows
  std::int64_t outputs = 0, output_pairs = 0;              // those of them that have edges, as RowSet counts
  std::int64_t window_pairs = 0, window_output_pairs = 0;  // in layers with a window; 0 where no layer has one
  std::int64_t forks = 0;                                  // runs that others of the set follow (RowRun)

  Work& operator+=(const Work& other) {
    rows += other.rows, pairs += other.pairs, outputs += other.outputs, output_pairs += other.output_pairs;
    window_pairs += other.window_pairs, window_output_pairs += other.window_output_pairs;
    forks += other.forks;
    return *this;
  }
  bool operator==(const Work&) const = default;
};

// Rows at depths [begin, end), all of them with or without edges, of a model with this window (0: none).
Work work_of_depths(std::int64_t begin, std::int64_t end, bool outputs, std::int64_t window = 0);
// Rows that the row at this depth sees in a layer with a window (0: none, and no such layer).
inline std::int64_t pairs_in_window(std::int64_t depth, std::int64_t window) {
  return depth < window ? depth + 1 : window;
}

// FLOPs split as the cost model needs them: head and layers run at their own row counts.
struct Flops {
  double layers = 0;   // matrix products of the layers, without experts
  double experts = 0;  // matrix products of experts: each runs over its own rows alone
  double head = 0;
  double attention = 0;

  double total() const { return layers + experts + head + attention; }
  Flops& operator+=(const Flops& other) {
    layers += other.layers, experts += other.experts, head += other.head, attention += other.attention;
    return *this;
  }
  Flops operator*(double times) const { return {layers * times, experts * times, head * times, attention * times}; }
};

Flops forward_flops(const ModelShape& shape, const Work& work, bool all_rows_choose = false);
Flops backward_flops(const ModelShape& shape, const Work& work, bool all_rows_choose = false);
// The second forward of rows whose activations were dropped, and a counting pass: the layers, not the head. For
// rows that recompute gate and up only: those products.
Flops recompute_flops(const ModelShape& shape, const Work& work, bool all_rows_choose = false);
Flops gate_up_flops(const ModelShape& shape, const Work& work, bool all_rows_choose = false);

// All that a step of this kind runs: forward, and with gradients backward [+ recomputation, counting pass]. Where the
// objective needs whole rollouts the head runs twice forwards: its log-probs are needed before their gradients, and
// logits are not kept.
Flops step_flops(const ModelShape& shape, const Work& work, const StepKind& kind, ItemState state);

}  // namespace espalier
