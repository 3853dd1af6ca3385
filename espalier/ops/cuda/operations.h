// The operations of a GPU by group: they pass tensors to the kernels of this folder.
//
// Device tensors are ATen CPU tensors that point to device memory: code above the operations only narrows and views
// them, which touches no memory. Compiled without CUDA: the launchers call the kernels of the CUDA library, or of the
// emulation.
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
DeltaRuleOperations delta_rule_operations();
ShortConvolutionOperations short_convolution_operations();
LatentOperations latent_operations();
void require_taken(const ModelShape& shape, at::ScalarType dtype);

// All of them.
const Operations& operations();

}  // namespace espalier::cuda
