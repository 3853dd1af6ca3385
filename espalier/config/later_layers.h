// Layers that read what other parts of the model computed (Gemma 4 E2B and E4B): the keys and values of an earlier
// layer, and inputs from the look-up.
#pragma once

#include "espalier/config/reading.h"

namespace espalier {

// Reads num_kv_shared_layers, with use_double_wide_mlp: the last layers read the keys and values of the last layer of
// their type before them. And hidden_size_per_layer_input, with vocab_size_per_layer_input. Windows were read before.
// Errors: InputError.
void read_later_layers(const Members& config, Reading& reading);

}  // namespace espalier
