// The entries of a Nemotron-H model are a mixer or an MLP each. A block here is a mixer with the MLP behind it, or
// without one.
#pragma once

#include <vector>

#include "espalier/shape/config_members.h"
#include "espalier/shape/layer_shape.h"

namespace espalier {

struct HalfBlocks {
  bool recurrent = false;  // Mamba-2; otherwise attention
  MlpKind mlp = MlpKind::none;
};

// From layers_block_type or hybrid_override_pattern. Errors: InputError without layers of Mamba-2; UnsupportedError for
// other entries, and for an MLP without a mixer right before it.
std::vector<HalfBlocks> read_half_blocks(const Members& config);

}  // namespace espalier
