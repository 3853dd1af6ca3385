// Where every parameter of a rank lies in one flat buffer, under its Hugging Face name.
//
// Weights, gradients, float32 masters and both moments use the same table; names, order and neighbours are those of
// plan/parameter_shapes.h. A tied head is `model.embed_tokens.weight` alone; a critic's is kValueWeight, kValueBias.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "espalier/plan/local_shape.h"

namespace espalier {

inline constexpr const char* kValueWeight = "score.weight";  // [1, M]
inline constexpr const char* kValueBias = "score.bias";      // [1]

struct Parameter {
  std::string name;
  std::vector<std::int64_t> shape;  // here, padding included; the whole one where there is one rank
  std::int64_t offset = 0;          // elements
  std::int64_t count = 0;
  Shard shard;  // which part of the file's tensor this is

  std::vector<std::int64_t> whole_shape() const;  // in files
};

// The `count` values of a whole parameter in host memory, until the next call. A caller that visits several
// asks for them in the table's order.
using ParameterValues = std::function<const void*(const Parameter&)>;
// Of a flat buffer in the table's layout whose elements take `bytes` each.
ParameterValues values_of(const void* flat, std::int64_t bytes);

class ParameterTable {
 public:
  // A ModelShape is the LocalShape of one rank.
  explicit ParameterTable(const LocalShape& shape);

  const std::vector<Parameter>& parameters() const { return parameters_; }  // ascending, gapless offsets
  std::int64_t size() const { return size_; }                               // elements
  const Parameter& at(const std::string& name) const;                       // InternalError when absent
  bool contains(const std::string& name) const { return index_.count(name) != 0; }
  bool elsewhere(const std::string& name) const { return elsewhere_.count(name) != 0; }  // other ranks have it

 private:
  void add(const ParameterShape& whole, const Shard& shard);

  std::vector<Parameter> parameters_;
  std::unordered_map<std::string, std::size_t> index_;
  std::unordered_set<std::string> elsewhere_;
  std::int64_t size_ = 0;
};

}  // namespace espalier
