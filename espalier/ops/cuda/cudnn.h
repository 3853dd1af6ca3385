// cuDNN, opened when it is asked for. Where the library was built without cudnn-frontend every function says so.
#pragma once

#include <memory>
#include <string>

#include "espalier/ops/cuda/launch.h"
#include "espalier/ops/cuda/sequence_graph.h"

namespace espalier::cuda {

// Graphs for the GPU of this process, whose runs are work of the stream. Errors: DeviceError where there is no cuDNN of
// 9.19 or newer, or on another GPU than Hopper (compute capability 9): on Ampere cuDNN cannot sum gradients of packed
// rows in one order.
std::unique_ptr<SequenceGraphs> open_cudnn(Stream stream, int capability);
// Graphs for a GPU that is elsewhere, described as cuDNN writes a device's properties (JSON): they are built, with
// kernels, and cannot run. Errors: DeviceError.
std::unique_ptr<SequenceGraphs> cudnn_without_gpu(const std::string& device_properties);

}  // namespace espalier::cuda
