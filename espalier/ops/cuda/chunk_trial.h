// Recurrent layers in chunks on tensor cores (delta_chunks.h) are used on a GPU that has shown that it runs them right.
#pragma once

#include <string>

#include "espalier/device/device.h"

namespace espalier::cuda {

// True if operations may run recurrent layers in chunks; false at first. For all devices of the process.
bool trusts_chunks();
void trust_chunks(bool trusted);

// Runs the delta rule and Mamba-2 of a small shape, with forks, on this device: row by row, and in chunks. Trusts
// chunks from then on if outputs, states and gradients agree within the bound of bfloat16 and of the chunks' products
// (split_tiles.h). Otherwise returns what differs, and by how much.
std::string try_chunks(Device& device);

}  // namespace espalier::cuda
