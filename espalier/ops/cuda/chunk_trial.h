// Recurrent layers in chunks on tensor cores (delta_chunks.h) are used on a GPU that has shown that it runs them right.
#pragma once

#include <string>

#include "espalier/device/device.h"

namespace espalier::cuda {

// True if operations may run recurrent layers in chunks; false at first. For all devices of the process.
bool trusts_chunks();
void trust_chunks(bool trusted);

// The most that chunks lose, as a part of the largest number of a result, on paths of this many chunks. A product of
// numbers that are two bfloat16 leaves out three terms of at most d = 2^-18 of it each (split_tiles.h). Roundings are
// of either sign and independent, so the roundings of a sum grow as its terms do, and roundings of factors that are
// sums of products add up as squares. A gradient is made from at most 10 products that follow each other (K K^T, four
// of the inverse, its own, three of the scans and the last), and each chunk between it and the row that it comes from
// adds two in either direction: 3 d sqrt(10 + 4 chunks). Float32 sums of up to 130 terms add 130 2^-24 < 3 d to each
// factor of 3 d. A result in bfloat16 is rounded once more.
double error_of_chunks(double chunks);
// A decay's gradient is the difference of sums over the 64 rows of its chunk, which do not cancel in their errors.
inline constexpr double kErrorOfDecays = 8;

// Runs the delta rule with decays of heads and of channels and Mamba-2, of a small shape and with forks, on this
// device: row by row, and in chunks. Trusts chunks from then on if outputs, states and gradients agree within
// error_of_chunks and the rounding to bfloat16. Otherwise returns what differs, and by how much.
std::string try_chunks(Device& device);

}  // namespace espalier::cuda
