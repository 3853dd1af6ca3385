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

#include "espalier/program/item_state.h"
#include "espalier/program/step_kind.h"
#include "espalier/program/work.h"
#include "espalier/shape/model_shape.h"

namespace espalier {

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
