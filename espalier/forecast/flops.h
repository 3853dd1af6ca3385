// Floating-point operations of a set of rows (mathematics, section 9).
//
// Per row: 2 x (weights in matrices). Per visible (query, key) pair of a layer: 4 H D. Backward: 2 x for matrices
// (gradients of inputs and of weights; 1 x for held matrices), 2.5 x for attention; layers before the first trained one
// have no backward. The last layer's query, attention, output and MLP, the final norm and the head run for output rows
// (rows with edges) only; its K and V for all rows. A last layer of experts runs all rows if their choices are needed.
// Recurrent layers: 6 dk dv (Mamba-2: 4 dk dv) per row and value head, at any depth. T rows, O output rows, H query
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
  double attention = 0;  // pairs of rows
  double states = 0;     // rows of recurrent layers

  double total() const { return layers + experts + head + attention + states; }
  Flops& operator+=(const Flops& other) {
    layers += other.layers, experts += other.experts, head += other.head, attention += other.attention;
    states += other.states;
    return *this;
  }
  Flops operator*(double times) const {
    return {layers * times, experts * times, head * times, attention * times, states * times};
  }
};

Flops forward_flops(const ModelShape& shape, const Work& work, bool all_rows_choose = false);
Flops backward_flops(const ModelShape& shape, const Work& work, bool all_rows_choose = false);
// The second forward of rows with recomputed activations, and a counting pass: the layers without the head. For rows
// that recompute only the second half of a block: the router, gate and up, and down if a norm follows it.
Flops recompute_flops(const ModelShape& shape, const Work& work, bool all_rows_choose = false);
Flops gate_up_flops(const ModelShape& shape, const Work& work, bool all_rows_choose = false);

// The FLOPs of a step of this kind: forward, and with gradients backward [+ recomputation, counting pass]. If the
// objective needs whole rollouts, the head runs forward twice: its log-probs are needed before their gradients, and
// logits are not kept.
Flops step_flops(const ModelShape& shape, const Work& work, const StepKind& kind, ItemState state);

}  // namespace espalier
