// Compares attention with very many rows with float64, on sampled rows.
//
// The cases of operation_check.h have about two hundred rows. Faults of grids with thousands of blocks, of offsets
// beyond 2^31 bytes, and of tiles that a loop skips appear only here.
#pragma once

#include <vector>

#include "espalier/selftest/operation_check.h"

namespace espalier {

// Runs attention and its backward in bfloat16: a path of R rows and R own rows in branches, R from 128 on doubled until
// a forward takes 20 ms or R is 16,384. Compares on sampled rows, computed on the host in float64 from the same inputs:
//   out_q, lse_q, dq_q         of sampled queries q
//   dk_j, dv_j                 of sampled keys j of the path and of the own rows, with the lse that the device gave
// An error is the Frobenius norm of the difference over that of the exact values. Allowed are 2 roundings to bfloat16
// in the forward (weights, result) and 4 in the backward (weights, slopes, `out` in delta, result), and for lse, which
// is float32, 2 R + D + 8 additions: rounding errors of different keys are independent, so their norms do not add up
// over keys.
std::vector<OperationCheck> check_large_attention(Device& device);

}  // namespace espalier
