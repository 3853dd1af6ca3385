// Layers of attention without a window in models that give them heads of their own (Gemma 4).
#pragma once

#include "espalier/config/reading.h"

namespace espalier {

// Fills Reading::full_attention from the attention of the other layers: with global_head_dim,
// num_global_key_value_heads and attention_k_eq_v. Errors: InputError.
void read_full_layers(const Members& config, const Family& family, Reading& reading);

}  // namespace espalier
