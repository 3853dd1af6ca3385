// Buffers of the head (device/buffers.h).
//
// B rows with logits at once, M width, V vocabulary, r the rank of what is added.
#pragma once

#include <array>
#include <cstdint>

#include "espalier/device/buffers.h"

namespace espalier {

// How a device computes the head.
struct HeadWay {
  bool ahead = false;        // the next block computes while the host reads this block's log-probs
  bool writes_sums = false;  // its products write sums (ops/products.h)
  std::int64_t rank = 0;     // of what is added to the product; 0: nothing is
};

// The head's block of logits. If the run's dtype is narrower than its sums, hidden rows and a run of the vocabulary's
// rows are widened first; or, if products write sums, the gradient of the logits is narrowed.
struct HeadBuffers : BufferList {
  HeadBuffers(ElementBytes bytes, std::int64_t outputs, std::int64_t vocabulary, std::int64_t width,
              bool with_gradients, HeadWay way = {});
  bool widens() const { return rooms[0].hidden_BM.index >= 0; }
  bool narrows() const { return grad_logits_BV.index >= 0; }
  bool has_two() const { return rooms[1].logits_BV.index >= 0; }
  // Buffers of a block from its product until its gradient is used.
  struct Room {
    Place logits_BV, hidden_BM;
  };
  std::int64_t block_rows, vocabulary_run;  // rows with logits at once; rows of the vocabulary widened at once
  std::array<Room, 2> rooms;
  Place weight_run_NM, grad_logits_BV, grad_hidden_BM;
  // Products of low rank are in the accumulator type: rows, A and B are widened where they are narrower.
  Place low_rank_Br, low_rank_hidden_BM, low_rank_a_rM, low_rank_b_Vr;
};

}  // namespace espalier
