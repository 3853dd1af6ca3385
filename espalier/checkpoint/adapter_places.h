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
#include <vector>

#include "espalier/shape/model_shape.h"
#include "espalier/shape/parameter_shapes.h"

namespace espalier {

// Element (i, j) of a parameter is (first_row + i row_step, first_column + j column_step) of the tensor.
struct AdapterPlace {
  std::string tensor;  // without base_model.model.
  std::int64_t tensor_rows = 0, tensor_columns = 0;
  std::int64_t rows = 0, columns = 0;  // of the parameter
  std::int64_t first_row = 0, row_step = 1, first_column = 0, column_step = 1;

  bool is_tensor() const { return rows == tensor_rows && columns == tensor_columns; }
  std::int64_t at(std::int64_t i, std::int64_t j) const {
    return (first_row + i * row_step) * tensor_columns + first_column + j * column_step;
  }
};

// By the parameters' names: all adapters of the shape.
std::map<std::string, AdapterPlace> adapter_places(const ModelShape& shape);

// The model with an adapter of every module that can have one.
ModelShape with_every_adapter(ModelShape shape, std::int64_t rank);

}  // namespace espalier
