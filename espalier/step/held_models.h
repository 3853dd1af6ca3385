// The models that a process holds and what training keeps with each, known from shapes alone: what must fit before any
// weight is read, and the bytes beside the steps of one of them. For a running process: step/workspace.h.
#pragma once

#include <cstdint>
#include <span>

#include "espalier/options/options.h"
#include "espalier/program/step_kind.h"
#include "espalier/shape/local_shape.h"

namespace espalier {

struct HeldModel {
  LocalShape shape = ModelShape();  // what this rank has of it
  HeldState state = kWeightsOnly;   // of it

  // Weights, and gradients and the optimizer's state where there are any.
  std::int64_t bytes(DType dtype) const;
};

// Bytes of all models but `one`.
std::int64_t bytes_beside(const HeldModel& one, std::span<const HeldModel> held, DType dtype);

// All of them, and what the process itself takes.
std::int64_t bytes_held(std::span<const HeldModel> held, DType dtype);

// Refuses at once, before any weight is read, models that --memory-budget cannot hold, or without a budget those that
// what is free cannot hold. The first is the one that --model names. Errors: MemoryBudgetError.
void require_room(std::span<const HeldModel> held, const Options& options);

}  // namespace espalier
