// Where every parameter of a rank lies in one flat buffer, under its Hugging Face name.
//
// Weights, gradients, float32 masters and both moments use the same table; names, order and neighbours are those of
// shape/parameter_shapes.h. Under --shard full a rank keeps a part of its parameters, one of every unit
// (shape/units.h): then flat buffers hold these parts, and offsets count in the whole that units make up. A tied head
// is `model.embed_tokens.weight` alone; a critic's is kValueWeight, kValueBias. Parameters that train and parameters
// that are held (--train) have a table and a flat buffer each; gradients, masters and moments exist in the first alone.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "espalier/shape/local_shape.h"
#include "espalier/shape/units.h"

namespace espalier {

inline constexpr const char* kValueWeight = "score.weight";  // [1, M]
inline constexpr const char* kValueBias = "score.bias";      // [1]

struct Parameter {
  std::string name;
  std::vector<std::int64_t> shape;  // here, padding included; the whole one where there is one rank
  std::int64_t offset = 0;          // elements
  std::int64_t count = 0;
  Shard shard;            // which part of the file's tensor this is
  std::string fused;      // the tensor of files that it is a part of, with its neighbours; "": its own
  bool low_rank = false;  // of an adapter, which no model directory has

  std::vector<std::int64_t> whole_shape() const;  // in files
};

// Elements of a parameter that stand together here and in the whole tensor, counted from the parameter's first.
struct ShardRun {
  std::int64_t whole = 0, local = 0, count = 0;
};
// All of what is here, without padding, ascending in both.
std::vector<ShardRun> runs_of(const Parameter& parameter);
// The kept part of these; `local` counts from the first element of the flat buffer.
std::vector<ShardRun> runs_of(const Parameter& parameter, const Kept& kept);

// The `count` values of a whole parameter in host memory, until the next call. A caller that visits several
// asks for them in the table's order.
using ParameterValues = std::function<const void*(const Parameter&)>;
// Reads a flat buffer in the table's layout whose elements take `bytes` each.
ParameterValues values_of(const void* flat, std::int64_t bytes);

class ParameterTable {
 public:
  // A ModelShape is the LocalShape of one rank.
  explicit ParameterTable(const LocalShape& shape, Parameters which = Parameters::all);

  const std::vector<Parameter>& parameters() const { return parameters_; }  // ascending, gapless offsets
  std::int64_t size() const { return size_; }                               // elements
  // Elements of flat buffers that this rank keeps: all unless weights are sharded.
  std::int64_t kept_size() const { return divided() ? units_.kept : size_; }
  Kept kept(const Parameter& parameter) const;
  // The part kept by the rank-th of the ranks that shard it.
  Kept kept(const Parameter& parameter, std::int64_t rank) const;
  bool divided() const { return divided_; }
  const Units& units() const { return units_; }           // none unless weights are divided
  const Unit* unit_of(const Parameter& parameter) const;  // null unless weights are divided
  const Parameter& at(const std::string& name) const;     // InternalError when absent
  bool contains(const std::string& name) const { return index_.count(name) != 0; }
  const Parameter* find(const std::string& name) const;  // null when absent
  // Another rank, or another table, has it.
  bool elsewhere(const std::string& name) const { return elsewhere_.count(name) != 0; }

 private:
  void add(const ParameterShape& whole, const Shard& shard);

  std::vector<Parameter> parameters_;
  Units units_;
  bool divided_;
  std::unordered_map<std::string, std::size_t> index_;
  std::unordered_set<std::string> elsewhere_;
  std::int64_t size_ = 0;
};

// Calls visit(first element of flat buffers, elements, kind) for every run of neighbours that are kept for which
// kind_of(parameter) is the same.
template <class KindOf, class Visit>
void for_each_run(const ParameterTable& table, KindOf kind_of, Visit visit) {
  const std::vector<Parameter>& parameters = table.parameters();
  for (std::size_t first = 0, last; first < parameters.size(); first = last) {
    const auto kind = kind_of(parameters[first]);
    Kept run = table.kept(parameters[first]);
    for (last = first + 1; last < parameters.size() && kind_of(parameters[last]) == kind; ++last) {
      const Kept next = table.kept(parameters[last]);
      if (next.count > 0 && run.count > 0 && next.place != run.place + run.count) break;
      if (run.count == 0) run.place = next.place;
      run.count += next.count;
    }
    if (run.count > 0) visit(run.place, run.count, kind);
  }
}

}  // namespace espalier
