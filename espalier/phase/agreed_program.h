// The program of a rank, in the order that it has in common with the ranks that it meets in its layers.
#pragma once

#include "espalier/parallel/mesh.h"
#include "espalier/program/program.h"

namespace espalier {

// A collective of all ranks of a stage, which tell each other the events of their plans (program/joint_order.h) where
// these may differ. Points into `plan`.
Program agreed_program(const Mesh& mesh, const StepPlan& plan, bool gradients);

}  // namespace espalier
