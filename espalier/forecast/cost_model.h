// Seconds of a set of rows on one machine: matrix products at a rate that grows with the number of rows, attention,
// memory-bound passes, and an overhead for every call. Products of experts run at the rate for the rows of one expert:
// R rows give each of E experts about R k / E.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "espalier/base/dtype.h"
#include "espalier/base/json_fwd.h"
#include "espalier/forecast/flops.h"
#include "espalier/forecast/memory_model.h"
#include "espalier/options/choices.h"
#include "espalier/shape/local_shape.h"

namespace espalier {

// Seconds by the parts of a step that --profile measures: matrix products of the layers; attention; norms, rotations,
// activations and all unassigned time; the head.
struct CostParts {
  double products = 0, attention = 0, rows = 0, head = 0;

  double total() const { return products + attention + rows + head; }
  CostParts& operator+=(const CostParts& other);
  CostParts operator*(const CostParts& factors) const;
};

// A few constants, measured once per machine (or defaults). Matrix rates are measured on products [rows, M] x [M, N]
// with the weights read from memory, so that the slowness of small row counts is measured, not assumed.
struct MachineProfile {
  // Rows at which the rates of gradients of weights and of the head's products are measured.
  static constexpr std::int64_t kGradientRows = 1024, kHeadRows = 256;

  struct Rate {
    std::int64_t rows;
    double flops_per_second;
  };
  std::string name = "default";
  std::string source = "default";  // or "measured", "published"
  std::string device = "cpu";      // or "cuda"
  DType dtype = DType::float32;
  int threads = 1;           // used in the measurement; each has its own buffers
  std::vector<Rate> matrix;  // ascending rows; between them the time is linear in rows
  // Gradients of weights, summed in the accumulator dtype over many rows; products of the head's block of logits,
  // computed in the accumulator dtype on a CPU. 0: use the table.
  double weight_gradient_flops_per_second = 0, head_flops_per_second = 0;
  double attention_flops_per_second = 0;
  // Rates of the operations that rows do by themselves, whatever their depth (MixerFlops::row), by kMixerKinds; 0: half
  // of attention's rate.
  std::array<double, kMixerKinds.size()> row_flops_per_second{};
  double row_rate(MixerKind kind) const {
    const double rate = row_flops_per_second[static_cast<std::size_t>(kind)];
    return rate > 0 ? rate : attention_flops_per_second / 2;
  }
  // The rates of small models: gradients of weights with 64 columns, attention with heads of 16 channels. The rates
  // above are of 1,024 columns and heads of 64. Between two widths the time of an operation is linear in 1/width; above
  // the larger it does not fall. 0: one rate for all widths.
  static constexpr double kWideColumns = 1024, kNarrowColumns = 64, kWideHead = 64, kNarrowHead = 16;
  double narrow_gradient_flops_per_second = 0, narrow_attention_flops_per_second = 0;
  AttentionKernels attention_kernels = AttentionKernels::own;  // that have this rate
  double bytes_per_second = 0;                                 // of memory-bound passes
  double spill_bytes_per_second = 5e8;                         // to and from the store of offloaded trunks
  double seconds_per_call = 0;                                 // overhead of one kernel
  std::int64_t memory_bytes = 0;                               // memory of the device; 0: unknown
  // Ranks per machine, and bytes a second that a rank sends within it and to another machine. Stated, not measured.
  std::int64_t ranks_per_machine = 8;
  double link_bytes_per_second = 2e9, network_bytes_per_second = 1e9;
  // Measured over predicted seconds of steps on this machine, by part; 1 until `bench` has fitted them.
  CostParts fit = {1, 1, 1, 1};
  std::int64_t fitted_steps = 0;

  double matrix_flops_per_second(double rows) const;
  // Fewest rows of the table whose rate is at least 95 % of the best.
  std::int64_t large_rows() const;
  std::string line() const;  // for a person, one line
};

// Round figures for a machine without measurements: a CPU with rates proportional to `threads`, or with "cuda" the
// published rates of an H100.
MachineProfile default_profile(Choice<DeviceType> device, DType dtype, int threads);

Json to_json(const MachineProfile& profile);
// Required are name, source, dtype, matrix and the rates of attention, bytes and calls; other members may be absent.
// Errors: InputError naming the member that is missing or absurd, OptionError for a dtype that is none.
MachineProfile profile_of(const Json& json, const std::string& where);

class CostModel {
 public:
  // For one rank: its layers, and its part of every product. Assumes that rows choose experts evenly.
  CostModel(const LocalShape& local, const MachineProfile& profile, DType dtype, const StepKind& kind = {},
            const StepSetting& setting = {});

  // The seconds of one set of rows in a step: forward, backward, and any recomputation.
  CostParts parts(const Work& work, ItemState state) const;
  double flops(const Work& work, ItemState state) const { return all_flops(work, state).total(); }
  // The sum, plus the cost of offloading: the part of writing and reading not hidden behind forward and backward, and
  // the copies. `path`: the item's part in the traffic and the products of its path.
  double seconds(const Work& work, ItemState state, const PathTraffic& path = {}) const;
  const ActivationBytes& bytes() const { return bytes_; }
  int threads() const { return profile_.threads; }
  // The time that `work` adds to a full wave (`full_rows` rows): no overhead of its own, at the wave's rate.
  double marginal_seconds(const Work& work, std::int64_t full_rows) const;

 private:
  // The part proportional to the work, at the rates for sets of `rows` rows; before the fit.
  CostParts variable_parts(const Work& work, ItemState state, std::int64_t rows, double passes) const;
  Flops all_flops(const Work& work, ItemState state) const;
  // The passes over an item's rows, counted in forwards; `again` is the part of a forward that its backward repeats.
  double passes_of(double again) const;
  // FLOPs for one row, one pair and so on: a step's FLOPs are linear in the work and computed very often.
  struct UnitFlops {
    Flops row, pair, output, output_pair, window_pair, window_output_pair;
  };
  UnitFlops unit_flops(ItemState state) const;
  void compare_widths();
  const UnitFlops& unit_of(ItemState state) const;
  double rows_per_expert(std::int64_t rows) const;
  // Seconds of the layers' products at this row count; `gradients`: the fraction of FLOPs in gradients of weights.
  // `narrow`: seconds of such a gradient over those at the rate of kWideColumns.
  double product_seconds(double flops, double rows, double gradients, double narrow) const;
  double head_seconds(double flops, std::int64_t outputs) const;
  double attention_seconds(const Flops& flops, const Work& work, ItemState state) const;

  ModelShape shape_;
  // The number of experts on this rank; the fraction of the rows' expert products computed here; and the rows that
  // choose among these experts, as a multiple of this rank's rows, because ranks of ep exchange rows.
  double experts_, expert_share_, row_sets_;
  bool has_head_;  // the last stage of pp
  MachineProfile profile_;
  StepKind kind_;
  ActivationBytes bytes_;
  bool has_windows_;
  UnitFlops kept_, mlp_again_, all_again_;  // by what is recomputed
  double expert_layers_ = 0;
  double seconds_per_row_flop_ = 0;  // of Flops::states
  std::int64_t calls_ = 0;           // kernels of one forward of all layers, without the experts'
  double bytes_per_row_ = 0;         // memory-bound traffic of one row and pass through all layers
  double logit_bytes_ = 0;           // and of the logits of one output row
  double backward_share_ = 1;        // fraction of layers that have a backward
  // Seconds over those at the rates of wide models: gradients of weights in layers and in experts, attention.
  double narrow_layers_ = 1, narrow_experts_ = 1, narrow_heads_ = 1;
  double gradient_bytes_ = 0;         // read and written once by every item: the accumulators of the layers' weights,
  double expert_gradient_bytes_ = 0;  // and the accumulators of the experts that it reaches
  double head_gradient_bytes_ = 0;
};

}  // namespace espalier
