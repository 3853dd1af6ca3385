// Built where cudnn-frontend or cudnn.h is not: everything but --attention cudnn does without.
#include "espalier/base/error.h"
#include "espalier/ops/cuda/cudnn.h"

namespace espalier::cuda {
namespace {

[[noreturn]] void refuse() {
  throw DeviceError({"--attention cudnn", "a CUDA library that was built with cudnn-frontend",
                     "one that was built where cudnn_frontend.h or cudnn.h is missing",
                     "install tools/requirements-cuda-build.txt and nvidia-cudnn-cu13 and build again: make cuda"});
}

}  // namespace

std::unique_ptr<SequenceGraphs> open_cudnn(Stream, int) { refuse(); }
std::unique_ptr<SequenceGraphs> cudnn_without_gpu(const std::string&, int) { refuse(); }

}  // namespace espalier::cuda
