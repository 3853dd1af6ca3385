// CUDA's streams and memory on a processor (espalier/ops/cuda/runtime.h), as hostile as CUDA allows them to be.
//
// Work of a stream runs when somebody waits for it, no earlier, in its order; that of two streams in an order that a
// seed decides and events allow: one as far ahead of the other as it can, or at random. Device memory cannot be touched
// but by work that runs; memory given back cannot be touched by anybody. The target of a copy to the host is NaN until
// the copy has run, and the source of one to the device is read when it runs. Pages hold NaN when they come.
#pragma once

#include <functional>

#include "espalier/device/device.h"

namespace espalier::testing {

// Order of the streams from now on, also of threads that begin to use them; what was given before runs first.
void set_stream_seed(unsigned seed);
// Connections of the GPU (ops/cuda/runtime.h), of this thread's streams and of the threads that begin.
void set_stream_connections(int connections);
// The most device memory that is free for this thread's runtime from now on.
void set_free_memory(std::int64_t bytes);
// How often the host has waited for an event so far.
std::int64_t host_waits();
// Work for the compute stream.
void give_to_compute(std::function<void()> work);

// The host code of a GPU over these streams, with the emulated kernels of espalier/ops/cuda.
Device& emulated_device();
// The same with attention by the kernels of espalier/ops/cuda/hopper/.
Device& emulated_hopper_device();
Device& emulated_hopper_split_device();
// The same with the CPU's operations as work of the compute stream: fast, for what the host code does. Each thread has
// its own, so that ranks may be threads.
Device& streamed_device();

// A program that links this file runs on emulated_device() where ESPALIER_TEST_DEVICE is "emulated", and on
// streamed_device() where it is "streamed".

}  // namespace espalier::testing
