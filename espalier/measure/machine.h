// The few constants that the cost model knows of this machine, measured once in a few seconds and cached.
//
// The cache lies in $XDG_CACHE_HOME/espalier (~/.cache/espalier), one file for each CPU, dtype and thread count, and
// one for the file system of --spill-dir. Plans must be the same in every run, so a machine whose cache cannot be
// written keeps the built-in constants. `bench` adds factors that hold the cost model to the steps it ran (cost_fit.h);
// nothing else changes a cached profile.
#pragma once

#include "espalier/forecast/cost_model.h"
#include "espalier/metrics/progress.h"
#include "espalier/options/options.h"
#include "espalier/parallel/mesh.h"

namespace espalier {

// Cached where it was measured before with these threads and dtype; measured and cached otherwise.
MachineProfile machine_profile(const Options& options, Progress& progress);

// The profile of rank 0 on every rank, so that all plan alike.
MachineProfile machine_profile(const Options& options, Progress& progress, const Mesh& mesh);

// The same before a measurement: if products now run more than a tenth faster than the profile says (it was taken under
// load), the profile is measured again and kept, with a note.
MachineProfile current_machine_profile(const Options& options, Progress& progress);

// Rates of matrix products by rows, of attention, of copying, and the cost of one call, each the best of a few runs in
// three rounds.
MachineProfile measure_machine(DType dtype);

// Rate of a matrix product of kProductRows rows now, over a twentieth of a second and as it comes, disturbances
// included: what a step that runs at about this moment can be held to.
inline constexpr std::int64_t kProductRows = 1024;
double product_flops_per_second(DType dtype);

// Writes the profile where machine_profile finds it. False where that cannot be done.
bool keep_profile(const MachineProfile& profile);

}  // namespace espalier
