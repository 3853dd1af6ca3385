// libespalier_emulated.so: what `--device emulate` opens in the place of libespalier_cuda.so.
#include "espalier/device/cuda_library.h"
#include "tests/cuda/emulated_runtime.h"

extern "C" espalier::Device* espalier_open_cuda_device(const espalier::GpuChoice& choice, std::string* problem) {
  using espalier::AttentionBy;
  if (choice.attention == AttentionBy::own || choice.attention == AttentionBy::automatic)
    return &espalier::testing::emulated_device();
  *problem = choice.attention == AttentionBy::flash ? "no FlashAttention-2 on processors" : "no cuDNN on processors";
  return nullptr;
}
