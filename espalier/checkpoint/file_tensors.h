// The tensors of files for users: of saved models, gradients, traces and additions. A row of the table of parameters
// knows its place in them (FilePlace).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "espalier/checkpoint/safetensors.h"
#include "espalier/model/parameters.h"

namespace espalier {

// A tensor that consists of parameters, or that is written as a file has it.
struct FileTensor {
  std::string name;
  std::vector<std::int64_t> shape;
  std::int64_t count = 0;
  struct Part {
    const Parameter* parameter;
    const FilePlace* place;  // null: the parameter is the whole tensor
  };
  std::vector<Part> parts = {};  // in the table's order
  const SafetensorsEntry* stored = nullptr;

  TensorType type(DType to) const { return stored != nullptr ? stored->type : tensor_type_of(to); }
  std::int64_t bytes(DType to) const { return count * bytes_of(type(to)); }
};

// The names of additions' tensors: the names of files, in which rows may be joined, or the rows' own.
enum class AddedNames : std::uint8_t { of_files, own };

// The tensors of the table's parameters, in its order. Names are without a prefix (checkpoint/added_values.h).
std::vector<FileTensor> file_tensors(const ParameterTable& table, AddedNames added = AddedNames::of_files);

std::vector<TensorSpec> specs_of(const std::vector<FileTensor>& tensors, DType to, const std::string& prefix = "");

// Takes values in pieces.
using ValueSink = std::function<void(const void* values, std::int64_t bytes)>;
// Gives the values of a parameter, converted, to the sink.
using GiveValues = std::function<void(const Parameter& parameter, const ValueSink& sink)>;
void give_converted(const ValueSink& sink, TensorType from, const void* values, DType to, std::int64_t count);

// Appends the tensor. Asks for the values of its parts once each, in their order. Where the table lacks a part of the
// tensor, because it does not train, the numbers are 0. Holds no more than the parts that lie among each other: the
// rows of an expert, or a tensor of additions.
void append_tensor(SafetensorsWriter& writer, const FileTensor& tensor, DType to, const GiveValues& give);

}  // namespace espalier
