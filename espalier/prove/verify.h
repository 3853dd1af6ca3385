// `verify`: compares the same step dense and shared, number by number, relative to the effect of rounding.
//
// The floor of a number is the larger of two distances from the dense run: to a dense run that adds in another order
// (rollouts reversed, one a wave), and, below float64, to a dense run in float64. A matrix of an expert has at least
// the root mean square of the floors of its layer's experts. A shared run may be twice as far from dense as the floor.
// In float64 it may be 1e-10 of the dense value away, whatever the floor (testing levels: docs/architecture.md, proof).
//
// Below float64 every run compared chooses experts as the dense float64 run did (moe/chosen_experts.h): a choice
// between experts that are nearly equal is made by rounding, and moves a log-prob by far more than rounding does.
#pragma once

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "espalier/moe/chosen_experts.h"
#include "espalier/observe/progress.h"
#include "espalier/options/options.h"
#include "espalier/parallel/mesh.h"

namespace espalier {

// One number or tensor compared: how far shared is from dense, and how far it may be.
struct Distance {
  double error = 0, floor = 0, allowed = 0;
  // At most 1 if the error is allowed. An error that is not a number is never allowed.
  double ratio() const {
    if (std::isnan(error) || std::isnan(allowed)) return 1e300;
    return allowed > 0 ? error / allowed : error > 0 ? 1e300 : 0;
  }
};

struct ParameterCheck {
  std::string name;
  Distance distance;  // relative L2, of the schedule farthest from dense
  double cosine = 1;  // least over the schedules
};

struct ScheduleCheck {
  std::string name;  // "phased, 64 rows a wave, recompute"
  std::int64_t physical_rows = 0, trunks = 0, waves = 0;
  double worst_ratio = 0;
};

struct Verdict {
  std::int64_t rollouts = 0, logical_rows = 0;
  double gradient_norm = 0;  // of the dense run; 0 where every advantage is 0, and then little is compared
  std::vector<ParameterCheck> parameters;
  std::vector<ScheduleCheck> schedules;
  Distance logprob;                        // largest absolute difference over response tokens
  std::int64_t other_bits = 0;             // response tokens whose log-prob has other bits than dense in some schedule
  Distance loss;                           // absolute
  double loss_dense = 0, loss_shared = 0;  // shared: of the schedule farthest from dense
  Distance optimizer;  // largest absolute difference of a weight after one update; reported, not judged
  // Held matrices in NF4: every run, that in float64 too, multiplies by the numbers that they stand for.
  std::int64_t nf4_matrices = 0;
  // Below float64, of a model with experts: how many choices of a dense run that chooses freely differ from those of
  // float64, which all runs compared repeat. Experts that rollouts record are not among them. Reported, not judged.
  std::optional<moe::ChoiceDifference> router;

  // With --critic its step is compared too: parameters and schedules are in the lists above, named "critic. ...".
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

// The first mini-batch of --rollouts; with --critic, the actor's step and the critic's. With --schedule auto every
// schedule is checked, with both trunk states and, where no --token-budget is given, also with waves a third as long as
// the longest rollout.
// On several ranks every run but the one in float64 is theirs together: that one is each rank's own, and outside their
// sums.
Verdict verify(const Options& options, Progress& progress, const Mesh& mesh = mesh_of_one());

}  // namespace espalier
