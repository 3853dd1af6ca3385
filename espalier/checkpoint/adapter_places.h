// Where peft's tensors hold the parameters of adapters, where it is not a tensor of the parameter's own name.
//
// In transformers some projections are one module (qkv_proj), and the experts of a layer are two parameters of one
// module, which peft adapts as target_parameters, one wrapper around the other:
//
//   qkv_proj.lora_A [r, in]                   its A;  qkv_proj.lora_B [out, r]: rows of q, then k, then v
//   experts.base_layer.lora_A [E r, M]        gate_up_proj: r rows of each expert in turn
//   experts.base_layer.lora_B [2 F, r E]      column j E + e is column j of expert e; rows of gate, then of up, or
//                                             in gpt-oss a row of gate and one of up in turn
//   experts.lora_A [E r, F], lora_B [M, r E]  down_proj
//
// If only one of the two parameters has an adapter, its tensors are experts.lora_A and experts.lora_B.
//
// Source: peft 0.21, ParamWrapper and inject_parameters.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "espalier/shape/file_place.h"
#include "espalier/shape/model_shape.h"

namespace espalier {

// By the parameters' names: all adapters of the shape. Every place names its tensor, without base_model.model., and is
// stated as a part of it.
std::map<std::string, FilePlace> adapter_places(const ModelShape& shape);

// The module of modules_to_save that a tensor of a model's files belongs to; the experts of a layer are one.
std::string saved_module(const std::string& tensor);

}  // namespace espalier
