// Seconds of a set of rows on one machine: matrix products at a rate that grows with the number of rows, attention,
// what is bound by memory, and an overhead for every call.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "espalier/base/dtype.h"
#include "espalier/plan/flops.h"
#include "espalier/plan/model_shape.h"

namespace espalier {

using Json = nlohmann::ordered_json;

// Few constants, measured once per machine (or defaults). Matrix rates are those of products [rows, M] x [M, N] with
// the weights read from memory, so that small row counts are slow by measurement, not by assumption.
struct MachineProfile {
  struct Rate {
    std::int64_t rows;
    double flops_per_second;
  };
  std::string name = "default";
  std::string source = "default";  // or "measured"
  DType dtype = DType::float32;
  std::vector<Rate> matrix;  // ascending rows; between them the time is linear in rows
  double attention_flops_per_second = 0;
  double bytes_per_second = 0;  // of memory-bound passes
  double seconds_per_call = 0;  // overhead of one kernel

  double matrix_flops_per_second(std::int64_t rows) const;
  // Fewest rows of the table whose rate is at least 95 % of the best.
  std::int64_t large_rows() const;
  std::string line() const;  // for a person, one line
};

// Round figures for a machine nobody measured. `threads` scales CPU rates.
MachineProfile default_profile(const std::string& device, DType dtype, int threads);

Json to_json(const MachineProfile& profile);
// Errors: InputError naming the member that is missing or absurd.
MachineProfile profile_of(const Json& json, const std::string& where);

class CostModel {
 public:
  CostModel(const ModelShape& shape, const MachineProfile& profile, DType dtype, const StepKind& kind = {});

  // All that a step runs for one set of rows: forward, backward, for a trunk perhaps the forward again.
  double seconds(const Work& work, bool recompute) const;
  double flops(const Work& work, bool recompute) const { return step_flops(shape_, work, kind_, recompute).total(); }
  // What `work` adds to a wave that is full anyway (`full_rows` rows): no overhead of its own, the wave's rate.
  double marginal_seconds(const Work& work, std::int64_t full_rows) const;

 private:
  double variable_seconds(const Flops& flops, const Work& work, std::int64_t rows, int passes) const;

  ModelShape shape_;
  MachineProfile profile_;
  StepKind kind_;
  double bytes_per_row_ = 0;   // memory-bound traffic of one row and pass through all layers
  double logit_bytes_ = 0;     // and of the logits of one output row
  double gradient_bytes_ = 0;  // every item reads and writes the accumulators of the layers' weights once
  double head_gradient_bytes_ = 0;
};

}  // namespace espalier
