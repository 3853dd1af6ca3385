// cuDNN, opened on first use. If the library was built without cudnn-frontend, every function reports that.
#pragma once

#include <memory>
#include <string>

#include "espalier/ops/cuda/launch.h"
#include "espalier/ops/cuda/sequence_graph.h"

namespace espalier::cuda {

// Graphs for the GPU of this process; runs are queued on the stream. Errors: DeviceError without cuDNN 9.19 or newer,
// and on GPUs other than Hopper and Blackwell (compute capabilities 9 and 10): on Ampere and on capability 12 cuDNN
// cannot sum gradients of packed rows in one order.
std::unique_ptr<SequenceGraphs> open_cudnn(Stream stream, int capability);
// Graphs for an absent GPU of this capability, described by cuDNN's JSON of device properties: they are built, with
// kernels, but cannot run. Errors: DeviceError.
std::unique_ptr<SequenceGraphs> cudnn_without_gpu(const std::string& device_properties, int capability);

}  // namespace espalier::cuda
