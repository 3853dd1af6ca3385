#include "espalier/state/held_models.h"

#include "espalier/base/error.h"
#include "espalier/base/units.h"
#include "espalier/device/device.h"
#include "espalier/forecast/memory_model.h"
#include "espalier/state/planning.h"

namespace espalier {

std::int64_t HeldModel::bytes(DType dtype) const { return ActivationBytes(shape, dtype, {}, {state, {}}).model(); }

std::int64_t bytes_beside(const HeldModel& one, std::span<const HeldModel> held, DType dtype) {
  std::int64_t sum = 0;
  for (const HeldModel& other : held)
    if (&other != &one) sum += other.bytes(dtype);
  return sum;
}

std::int64_t bytes_held(std::span<const HeldModel> held, DType dtype) {
  const HeldModel& first = held.front();
  HeldState state = first.state;
  state.beside_bytes = bytes_beside(first, held, dtype);
  return ActivationBytes(first.shape, dtype, {}, {state, {}}).constant();
}

namespace {

// A GPU's budget is for the models; the process itself is on the host.
std::int64_t needed_for(std::span<const HeldModel> held, DType dtype) {
  if (bound_device().in_host_memory()) return bytes_held(held, dtype);
  return held.front().bytes(dtype) + bytes_beside(held.front(), held, dtype);
}

}  // namespace

void require_room(std::span<const HeldModel> held, const Options& options) {
  const HeldModel& first = held.front();
  const std::int64_t own = first.bytes(options.dtype), beside = bytes_beside(first, held, options.dtype);
  const Budget budget = budget_of(options);
  const bool given = budget.given;
  const std::int64_t needed = needed_for(held, options.dtype), process = needed - own - beside;
  const std::int64_t room = bound_device().in_host_memory() ? budget.bytes : budget.beside_held();
  if (needed <= room) return;
  const char* what = first.state.optimizer   ? "weights, gradients and optimizer state"
                     : first.state.gradients ? "weights and gradients"
                                             : "weights";
  std::string rest = beside > 0 ? text_of(", ", format_bytes(beside), " of other models") : "";
  if (process > 0) rest += text_of(" and ", format_bytes(process), " that the process itself takes");
  std::string remedy = given ? text_of("Raise --memory-budget above ", format_bytes(needed), " (", needed, " bytes)")
                             : "Free memory, or use a machine with more";
  if (const std::int64_t in_bfloat16 = needed_for(held, DType::bfloat16); in_bfloat16 < needed)
    remedy += text_of(", or use --dtype bfloat16, with which ",
                      in_bfloat16 <= room ? "it fits" : format_bytes(in_bfloat16) + " would do");
  throw MemoryBudgetError({given ? "--memory-budget" : "memory",
                           text_of("more than ", format_bytes(needed), ": ", format_bytes(own), " of ", what, rest),
                           given ? format_bytes(room) : budget.text(), remedy});
}

}  // namespace espalier
