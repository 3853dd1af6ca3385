// Built where nccl.h is not: a run of one rank does without.
#include "espalier/base/error.h"
#include "espalier/ops/cuda/collectives.h"

namespace espalier::cuda {

std::unique_ptr<Communicator> join(const std::shared_ptr<Group>&, double) {
  throw DeviceError({"--device cuda on several ranks", "a CUDA library that was built with NCCL",
                     "one that was built where nccl.h is missing",
                     "install nvidia-nccl-cu13 (tools/requirements-cuda-libraries.txt) and build again: make cuda"});
}

}  // namespace espalier::cuda
