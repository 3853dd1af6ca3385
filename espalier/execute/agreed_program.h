// The rank program in the order shared with every rank that this rank meets in collectives inside layers.
#pragma once

#include "espalier/parallel/mesh.h"
#include "espalier/program/program.h"

namespace espalier {

// A collective of all ranks of a stage: they exchange the events of their plans (program/joint_order.h) if the plans
// may differ. The result points into `plan`.
Program agreed_program(const Mesh& mesh, const StepPlan& plan, bool gradients);

}  // namespace espalier
