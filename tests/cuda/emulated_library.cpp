// libespalier_emulated.so: what `--device emulate` opens in the place of libespalier_cuda.so.
#include "espalier/base/error.h"
#include "espalier/device/cuda_library.h"
#include "tests/cuda/emulated_runtime.h"

extern "C" espalier::Device* espalier_open_gpu(const espalier::GpuChoice& choice, espalier::OpenedGpu* opened,
                                               std::string* problem) {
  using espalier::AttentionKernels;
  const bool automatic = choice.attention == AttentionKernels::automatic;
  *opened = {"emulated", automatic ? AttentionKernels::own : choice.attention, true};
  if (opened->attention == AttentionKernels::own) return &espalier::testing::emulated_device();
  if (opened->attention == AttentionKernels::hopper) return &espalier::testing::emulated_hopper_device();
  if (opened->attention == AttentionKernels::hopper_split) return &espalier::testing::emulated_hopper_split_device();
  *problem = espalier::text_of("no ", name_of(choice.attention), " on processors");
  return nullptr;
}
