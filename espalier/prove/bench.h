// `bench`: dense against packed, phased and auto, on the same rollouts and weights, in one process.
//
// With --schedule, dense against that schedule alone, which then stands in the place of auto as well.
// Seconds are medians of alternating runs (dense, packed, phased, auto, dense, ...), so that changes in the machine's
// speed affect all of them alike. The gradients of the timed runs themselves are compared with dense.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "espalier/measure/step_profile.h"
#include "espalier/metrics/progress.h"
#include "espalier/options/options.h"
#include "espalier/parallel/mesh.h"

namespace espalier {

struct BenchMeasure {
  double seconds = 0;        // median of a whole gradient: plan, forward, loss, backward; no optimizer
  std::vector<double> runs;  // seconds of each
  std::vector<double> product_flops_per_second;  // of a large matrix product, measured around each run
  double predicted_seconds = 0;
  std::int64_t peak_bytes = 0, predicted_peak_bytes = 0;
  std::int64_t physical_rows = 0;
  double gradient_error = 0;  // relative L2 distance of the whole gradient from dense, maximum over the runs
  double flops = 0;
  std::optional<StepProfile> profile;  // of the last run, with --profile
};

struct BenchCell {
  std::int64_t prefix = 0, suffix = 0, n = 0;  // prompt and response tokens, responses; medians for --rollouts
  BenchMeasure dense, packed, phased, automatic;
  double product_flops_per_second = 0;  // of a large matrix product, median over the same turns
  double profile_flops_per_second = 0;  // the same in the machine's profile, which predicted the seconds
  std::int64_t fitted_steps = 0;        // number of steps that the profile was fitted to; 0: none
  double ceiling = 1;                   // FLOPs dense / FLOPs with every shared row once
  std::string chosen;                   // schedule that auto took; of several, the first of dense, packed, phased
  std::string same_plan;                // schedule with the same plan as auto, row for row; empty: none

  double speedup() const { return automatic.seconds > 0 ? dense.seconds / automatic.seconds : 0; }
  double fraction() const { return speedup() / ceiling; }
};

// One cell for every --splits x --n, or one for --rollouts. Calls on_cell when a cell ends. Every rank of the mesh
// calls it; under dp a cell of --splits has a group for each rank, and seconds are the slowest rank's. With one
// rank on a CPU the machine's cached profile is fitted to the steps that ran, if there were enough and the machine was
// quiet enough (measure/cost_fit.h); a note reports it.
std::vector<BenchCell> bench(const Options& options, Progress& progress,
                             const std::function<void(const BenchCell&)>& on_cell, const Mesh& mesh = mesh_of_one());

}  // namespace espalier
