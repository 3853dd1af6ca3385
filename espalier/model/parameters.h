// The table of a rank's parameters: the place of each in one flat buffer, under its Hugging Face name.
//
// Weights, gradients, float32 masters and both moments use the same table; names, order and neighbours come from
// shape/parameter_shapes.h. Under --shard full a rank keeps a part of every unit (shape/units.h): flat buffers hold
// these parts, and offsets count in the concatenation of whole units. A tied head is `model.embed_tokens.weight` only;
// a critic's head is kValueWeight, kValueBias. Trained and held parameters (--train) have separate tables and flat
// buffers; gradients, masters and moments exist for trained ones only.
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
  std::vector<std::int64_t> shape;  // on this rank, padding included; the whole shape with one rank
  std::int64_t offset = 0;          // in elements; in bytes for quantised ones
  std::int64_t count = 0;
  Shard shard;         // which part of the whole parameter this is
  FilePlace file;      // where files hold the whole parameter
  bool added = false;  // of an addition, so absent from model directories
  Start start = Start::own;
  std::int64_t quantised_row = 0;  // bytes of a row (base/quantised_rows.h); 0: of elements

  std::vector<std::int64_t> whole_shape() const;
  const std::string& file_tensor() const { return file.tensor.empty() ? name : file.tensor; }
  std::vector<std::int64_t> buffer_shape() const;  // of elements, or of bytes
};

// Elements of a parameter that are contiguous here and in the whole tensor, counted from the parameter's first element.
struct ShardRun {
  std::int64_t whole = 0, local = 0, count = 0;
};
// The runs of this rank's part, without padding, ascending in both.
std::vector<ShardRun> runs_of(const Parameter& parameter);
// The kept part of these runs; `local` counts from the first element of the flat buffer.
std::vector<ShardRun> runs_of(const Parameter& parameter, const Kept& kept);

// Returns the `count` values of a whole parameter in host memory, valid until the next call. Several parameters are
// read in the table's order.
using ParameterValues = std::function<const void*(const Parameter&)>;
// Reads a flat buffer in the table's layout; `bytes`: of one element.
ParameterValues values_of(const void* flat, std::int64_t bytes);

class ParameterTable {
 public:
  // A ModelShape is the LocalShape of one rank.
  explicit ParameterTable(const LocalShape& shape, Parameters which = Parameters::all);

  const std::vector<Parameter>& parameters() const { return parameters_; }  // ascending, gapless offsets
  std::int64_t size() const { return size_; }                               // elements
  // Elements of flat buffers on this rank: all unless weights are sharded.
  std::int64_t kept_size() const { return sharded() ? units_.kept : size_; }
  Kept kept(const Parameter& parameter) const;
  // The part kept by rank `rank` of the ranks that shard the parameter.
  Kept kept(const Parameter& parameter, std::int64_t rank) const;
  bool sharded() const { return sharded_; }
  const Units& units() const { return units_; }           // empty unless weights are sharded
  const Unit* unit_of(const Parameter& parameter) const;  // null unless weights are sharded
  const Parameter& at(const std::string& name) const;     // InternalError when absent
  bool contains(const std::string& name) const { return index_.count(name) != 0; }
  const Parameter* find(const std::string& name) const;  // null when absent
  // True if another rank, or another table, has the parameter.
  bool elsewhere(const std::string& name) const { return elsewhere_.count(name) != 0; }

 private:
  void add(const ParameterShape& whole, const Shard& shard, const quantised::Form& form);

  std::vector<Parameter> parameters_;
  Units units_;
  bool sharded_;
  std::unordered_map<std::string, std::size_t> index_;
  std::unordered_set<std::string> elsewhere_;
  std::int64_t size_ = 0;
};

// Calls visit(first element of flat buffers, elements, kind) for every run of kept neighbours with the same
// kind_of(parameter).
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
