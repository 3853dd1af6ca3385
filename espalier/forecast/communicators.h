// Bytes that NCCL's communicators take on a GPU, beside all tensors.
//
// A group of a rank has two communicators, the second one for sends to lower ranks (ops/cuda/nccl.cpp). Since NCCL 2.22
// a communicator takes its buffers when it is first used. It has, for each of its channels, a receiving buffer for each
// protocol: 4 MiB for Simple (NCCL_BUFFSIZE), 512 KiB for LL (8 steps of 512 threads with 8 lines of 16 bytes) and 4.7
// MiB for LL128 (8 steps of 640 threads with 120 numbers of 8 bytes). Up to 24 channels are in use between GPUs with
// NVLink of the fourth generation. Source: NCCL's documented defaults and the constants of its src/include/device.h.
// Not measured.
#pragma once

#include <cstdint>

#include "espalier/parallel/degrees.h"
#include "espalier/shape/model_shape.h"

namespace espalier {

inline constexpr std::int64_t kNcclChannels = 24;
inline constexpr std::int64_t kNcclChannelBytes = (4 << 20) + 8 * 512 * 8 * 16 + 8 * 640 * 120 * 8;

// The communicators that a rank of this layout uses, at most. `experts`, `states`: the model has experts, or layers
// whose states go along cp. 0 for one rank.
std::int64_t used_communicators(const Degrees& degrees, bool experts, bool states);
std::int64_t communicator_bytes(const Degrees& degrees, const ModelShape& shape);

}  // namespace espalier
