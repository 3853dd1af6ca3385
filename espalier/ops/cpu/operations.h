// The operations of a CPU by group: they pass tensors to the kernels of this folder.
#pragma once

#include <memory>

#include "espalier/ops/operations.h"

namespace espalier {
class Device;
}

namespace espalier::cpu {

NormOperations norm_operations();
RotationOperations rotation_operations();
SwigluOperations swiglu_operations();
ProductOperations product_operations();
MovingOperations moving_operations();
AttentionOperations attention_operations();
AttentionOperations flash_attention_operations();  // by ATen's FlashAttention if it can (ops/attention/composed.h)
HeadOperations head_operations();
ExpertOperations expert_operations();
OptimizerOperations optimizer_operations();
ChoiceOperations choice_operations();
DeltaRuleOperations delta_rule_operations();
ShortConvolutionOperations short_convolution_operations();
LatentOperations latent_operations();

// All of them; with attention by ATen's FlashAttention.
const Operations& operations();
const Operations& flash_operations();

// The processors of this machine with these operations, which must outlive the device.
std::unique_ptr<Device> device_with(const Operations& operations);

}  // namespace espalier::cpu
