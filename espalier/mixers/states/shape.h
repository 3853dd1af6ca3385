// The common part of mixers whose rows pass a state on: rows are projected, mixed along the runs of the set, and read
// by a last product.
#pragma once

#include <cstdint>

#include "espalier/shape/mixer.h"

namespace espalier {

class StateMixer : public Mixer {
 public:
  using Mixer::Mixer;

  // Its first product gives the columns of a projected row that are products with rows: all of them, unless there are
  // latents.
  std::int64_t projected() const { return widest_row(); }
  // The latents of gates and decays, side by side, each this wide, and the columns that are products with them.
  struct Latents {
    std::int64_t each = 0, gates = 0, decays = 0;
  };
  virtual Latents latents() const { return {}; }
  // True if mixed rows pass a gated norm before the last product.
  virtual bool gates_rows() const { return false; }

  std::int64_t saved_bytes(const BlockShape& block, const BlockRows& rows) const final;
  std::int64_t forward_bytes(const BlockShape& block, const BlockRows& rows, BlockBytes of_block) const final;
  std::int64_t backward_bytes(const BlockShape& block, const BlockRows& rows, BlockBytes of_block) const final;
};

}  // namespace espalier
