// `verify`: compares the same step dense and shared, number by number, relative to the effect of rounding.
//
// The floor of a number is its largest distance from the dense run in other dense runs: one that adds in another order
// (rollouts reversed, in other waves); below float64 also one with the last bits of all weights flipped and one in
// float64, and six more if a schedule is too far. An expert's matrix has at least the root mean square of the floors of
// its layer's experts. Shared may differ by twice the floor, in float64 by 1e-10 of the dense value
// (docs/architecture.md).
//
// Below float64 all compared runs use the experts that the dense float64 run chose (model/chosen_experts.h): rounding
// decides between nearly equal experts, and another choice moves a log-prob by far more than rounding does.
#pragma once

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "espalier/base/quantised_rows.h"
#include "espalier/metrics/progress.h"
#include "espalier/model/chosen_experts.h"
#include "espalier/options/options.h"
#include "espalier/parallel/mesh.h"

namespace espalier {

// One compared number or tensor: the distance of shared from dense, and the allowed distance.
struct Distance {
  double error = 0, floor = 0, allowed = 0;
  // At most 1 if the error is allowed. NaN is never allowed.
  double ratio() const {
    if (std::isnan(error) || std::isnan(allowed)) return 1e300;
    return allowed > 0 ? error / allowed : error > 0 ? 1e300 : 0;
  }
};

struct ParameterCheck {
  std::string name;
  Distance distance;  // relative L2, of the schedule farthest from dense
  double cosine = 1;  // minimum over the schedules
};

struct ScheduleCheck {
  std::string name;  // "phased, 64 rows a wave, recompute"
  std::int64_t physical_rows = 0, trunks = 0, waves = 0;
  double worst_ratio = 0;
};

struct Verdict {
  std::int64_t rollouts = 0, logical_rows = 0;
  double gradient_norm = 0;  // of the dense run; 0 if every advantage is 0: the comparison then means little
  std::vector<ParameterCheck> parameters;
  std::vector<ScheduleCheck> schedules;
  Distance logprob;                        // largest absolute difference over response tokens
  std::int64_t other_bits = 0;             // response tokens whose log-prob is not bitwise dense's in some schedule
  Distance loss;                           // absolute
  double loss_dense = 0, loss_shared = 0;  // shared: of the schedule farthest from dense
  Distance optimizer;  // largest absolute difference of a weight after one update; not part of the verdict
  // The number of held matrices in few bits, and their form. Every run, also in float64, multiplies by their numbers.
  std::int64_t quantised_matrices = 0;
  quantised::Kind quantised_kind = quantised::Kind::none;
  // With experts, below float64: the number of choices in which a dense run that chooses freely differs from float64,
  // whose choices all compared runs use. Recorded experts do not count. Not part of the verdict.
  std::optional<moe::ChoiceDifference> router;

  // With --critic the critic's step is compared too. Its parameters and schedules are in the lists above, with the
  // prefixes "critic." and "critic: ".
  struct CriticPart {
    Distance values;  // as logprob
    Distance loss;
    double loss_dense = 0, loss_shared = 0;
    std::optional<moe::ChoiceDifference> router;
  };
  std::optional<CriticPart> critic;

  bool pass() const;
  const ParameterCheck& worst() const;
};

// Verifies the first mini-batch of --rollouts; with --critic, the actor's step and the critic's. With --schedule auto
// every schedule is checked, with both trunk states and, without --token-budget, also with waves a third as long as the
// longest rollout.
// On several ranks all of them run every step together, the one in float64 too.
Verdict verify(const Options& options, Progress& progress, const Mesh& mesh = mesh_of_one());

}  // namespace espalier
