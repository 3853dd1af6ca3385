// Shared-prefix attention of bfloat16 for compute capability 9.0: contract in ops/attention/rows.h. Path rows
// and own rows are keys of one kernel, so nothing is merged. Tiles come by the copy engine (TMA), products run on
// warpgroups (wgmma), and one warpgroup of a block copies while the others multiply. Weights and slopes are rounded to
// bfloat16 as factors of the second products; sums are in float32, in an order that depends on the shape alone.
#pragma once

#include "espalier/ops/attention/rows.h"

namespace espalier::cuda::hopper {

// True if a GPU of this compute capability runs the kernels: their code (sm_90a) runs on no other one.
constexpr bool runs_on(int major, int minor) { return major == 9 && minor == 0; }

// True if the forward takes a problem: heads of 64, 96, 128, 192 and 256 elements with values of the same size, and of
// 192 with values of 128; rows at multiples of 16 bytes; a positive scale. A shape's value_dim is given, not 0.
bool takes_forward(const attention::Shape& shape, const attention::Inputs<bfloat16>& in,
                   attention::Rows<const bfloat16> out);
void forward(const attention::Shape& shape, const attention::Inputs<bfloat16>& in, attention::Rows<bfloat16> out,
             float* lse_HQ);

// True if the backward takes a problem: one that the forward takes.
bool takes_backward(const attention::Shape& shape, const attention::Inputs<bfloat16>& in,
                    attention::Rows<const bfloat16> grad_out, attention::Rows<const bfloat16> grad_q);
// Overwrites the gradients of queries, and adds to the others. `in_turn`: blocks of the path's keys may add to sums of
// the gradients of queries in memory, one after another, where the GPU holds all blocks of a launch.
void add_backward(const attention::Shape& shape, const attention::Inputs<bfloat16>& in,
                  attention::Rows<const bfloat16> out, const float* lse_HQ, attention::Rows<const bfloat16> grad_out,
                  const attention::Gradients<bfloat16>& grads, bool in_turn);

// The most blocks that take turns at a time: multiprocessors of an H100 or H200 (132) but for four, which are left to
// communication. The order of the sums depends on it. Tests set fewer, so that small problems take several launches.
inline constexpr std::int64_t kBlocksTogether = 128;
void set_blocks_together(std::int64_t blocks);

// True if the copy engine reads these rows.
bool takes_copies(const attention::Rows<const bfloat16>& rows);

// Calls body with the sizes of a head's keys and values, and whether there is a window or a cap.
template <class Body>
void with_sizes(const attention::Shape& shape, Body&& body) {
  const auto with_rules = [&]<int D, int V>() {
    shape.window > 0 || shape.soft_cap > 0 ? body.template operator()<D, V, true>()
                                           : body.template operator()<D, V, false>();
  };
  switch (shape.head_dim) {
    case 64:
      return with_rules.template operator()<64, 64>();
    case 96:
      return with_rules.template operator()<96, 96>();
    case 128:
      return with_rules.template operator()<128, 128>();
    case 192:
      return shape.values() == 128 ? with_rules.template operator()<192, 128>()
                                   : with_rules.template operator()<192, 192>();
    default:
      return with_rules.template operator()<256, 256>();
  }
}

}  // namespace espalier::cuda::hopper
