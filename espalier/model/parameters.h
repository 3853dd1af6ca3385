// Where every parameter of a model lies in one flat buffer, under its Hugging Face name.
//
// Weights, gradients, float32 masters and both moments use the same table. Matrices that one product reads together
// (q, k, v; gate, up) are neighbours, so that a single view covers them; so are gate and up of all experts of a layer,
// and then down of all of them. A tied head is `model.embed_tokens.weight` alone; a critic's is kValueWeight,
// kValueBias.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "espalier/plan/model_shape.h"

namespace espalier {

inline constexpr const char* kValueWeight = "score.weight";  // [1, M]
inline constexpr const char* kValueBias = "score.bias";      // [1]

struct Parameter {
  std::string name;
  std::vector<std::int64_t> shape;
  std::int64_t offset = 0;  // elements
  std::int64_t count = 0;
};

class ParameterTable {
 public:
  explicit ParameterTable(const ModelShape& shape);

  const std::vector<Parameter>& parameters() const { return parameters_; }  // ascending, gapless offsets
  std::int64_t size() const { return size_; }                               // elements
  const Parameter& at(const std::string& name) const;                       // InternalError when absent
  bool contains(const std::string& name) const { return index_.count(name) != 0; }

 private:
  void add(std::string name, std::vector<std::int64_t> shape);

  std::vector<Parameter> parameters_;
  std::unordered_map<std::string, std::size_t> index_;
  std::int64_t size_ = 0;
};

}  // namespace espalier
