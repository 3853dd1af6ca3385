// The bytes of a process's models and of their training state, computed from shapes alone: to refuse models that do not
// fit before any weight is read, and to count the other models during a step of one. For a running process:
// step/workspace.h.
#pragma once

#include <cstdint>
#include <span>

#include "espalier/options/options.h"
#include "espalier/program/step_kind.h"
#include "espalier/shape/local_shape.h"

namespace espalier {

struct HeldModel {
  LocalShape shape = ModelShape();  // this rank's part
  HeldState state = kWeightsOnly;   // gradients and optimizer state, besides weights

  // Bytes of weights, and of gradients and optimizer state if there are any.
  std::int64_t bytes(DType dtype) const;
};

// Bytes of all models but `one`, which is an element of `held`.
std::int64_t bytes_beside(const HeldModel& one, std::span<const HeldModel> held, DType dtype);

// Bytes of all models and of the process itself.
std::int64_t bytes_held(std::span<const HeldModel> held, DType dtype);

// Refuses models that do not fit --memory-budget, or without a budget the free memory, before any weight is read. The
// first model is the one of --model. Errors: MemoryBudgetError.
void require_room(std::span<const HeldModel> held, const Options& options);

}  // namespace espalier
