// What a rank of cp gives to the collectives of its group while a step's items run.
#pragma once

#include <cstdint>
#include <span>

#include "espalier/base/dtype.h"
#include "espalier/plan/local_shape.h"
#include "espalier/plan/step_kind.h"
#include "espalier/plan/step_plan.h"

namespace espalier {

// L layers, J key/value heads of size D, E experts here, R ranks, S rows of the rank with most of a divided set, b and
// B bytes of an activation and of a sum:
//
//   a divided trunk: 2 L S J D b forward (phase A), 2 L R S J D B backward (phase C);
//   a divided wave: both, and its keys and values once more for its backward and for a recomputation (phase B);
//   a wave that was dealt whole: nothing.
//
// Where derivatives need whole rollouts, 16 bytes forward and 16 backward for every loss edge of a divided set; where
// router losses need the choices of whole rollouts (`counts`), 8 L E forward and backward for every rollout of it.
PhaseBytes bytes_over_cp(const StepPlan& plan, std::span<const Rollout> batch, const LocalShape& shape, DType dtype,
                         const StepKind& kind, bool counts, std::int64_t ranks);

}  // namespace espalier
