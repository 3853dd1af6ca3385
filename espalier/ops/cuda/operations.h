// The operations of a GPU, group by group: tensors to the kernels of this folder.
//
// A device's tensors are ATen's CPU tensors whose memory is the device's: everything above the operations only narrows
// and views them, which touches no memory. Compiled without CUDA: the kernels behind the launchers are the CUDA
// library's, or the emulation's.
#pragma once

#include "espalier/ops/operations.h"

namespace espalier::cuda {

NormOperations norm_operations();
RotationOperations rotation_operations();
SwigluOperations swiglu_operations();
ProductOperations product_operations();
MovingOperations moving_operations();
AttentionOperations attention_operations();
HeadOperations head_operations();
ExpertOperations expert_operations();
OptimizerOperations optimizer_operations();
ChoiceOperations choice_operations();

// All of them.
const Operations& operations();

}  // namespace espalier::cuda
