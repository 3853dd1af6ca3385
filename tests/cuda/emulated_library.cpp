// libespalier_emulated.so: what `--device emulate` opens in the place of libespalier_cuda.so.
#include "espalier/device/cuda_library.h"
#include "tests/cuda/emulated_runtime.h"

extern "C" espalier::Device* espalier_open_gpu(const espalier::GpuChoice& choice, espalier::OpenedGpu* opened,
                                               std::string* problem) {
  using espalier::AttentionBy;
  const bool own = choice.attention == AttentionBy::own || choice.attention == AttentionBy::automatic;
  const bool hopper = choice.attention == AttentionBy::hopper;
  *opened = {"emulated", hopper ? AttentionBy::hopper : AttentionBy::own, true};
  if (hopper) return &espalier::testing::emulated_hopper_device();
  if (own) return &espalier::testing::emulated_device();
  *problem = choice.attention == AttentionBy::flash ? "no FlashAttention-2 on processors" : "no cuDNN on processors";
  return nullptr;
}
