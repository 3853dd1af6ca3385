#include "espalier/phase/schedule.h"

#include <algorithm>
#include <chrono>

#include "espalier/base/mutation.h"
#include "espalier/phase/item_run.h"

namespace espalier {
namespace {

// Runs one phase of one item and books its time and its peak.
template <class Work>
void book(StepRun& step, double& seconds, std::int64_t& peak, Work&& work) {
  const auto begin = std::chrono::steady_clock::now();
  step.arena.reset_high_water();
  work();
  peak = std::max(peak, step.arena.high_water());
  seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

std::int64_t items_below(const PlanItem& trunk) {
  std::int64_t count = 0;
  for (const PlanItem& item : trunk.below) count += 1 + items_below(item);
  return count;
}

void run_items(StepRun& step, const std::vector<PlanItem>& items);

void run_wave(StepRun& step, const PlanItem& item) {
  book(step, step.seconds.waves, step.arena_bytes.b, [&] {
    const ArenaScope scope(step.arena);
    ItemRun wave(step, item);
    wave.forward();
    if (step.trains()) wave.backward();
  });
  if (step.on_rows) step.on_rows(step.trunk_rows + step.wave_rows);
}

void run_trunk(StepRun& step, const PlanItem& item) {
  const ArenaScope scope(step.arena);
  ItemRun trunk(step, item);
  step.path.push(item.set.rows, items_below(item));
  book(step, step.seconds.trunk_forward, step.arena_bytes.a, [&] { trunk.forward(); });  // phase A
  ++step.trunk_forwards;
  if (ESPALIER_MUTATION(contributions_read_early) && step.trains()) trunk.backward();
  run_items(step, item.below);                                                                                // phase B
  if (step.trains()) book(step, step.seconds.trunk_backward, step.arena_bytes.c, [&] { trunk.backward(); });  // phase C
  step.path.pop();
}

void run_items(StepRun& step, const std::vector<PlanItem>& items) {
  for (const PlanItem& item : items) item.kind == ItemKind::trunk ? run_trunk(step, item) : run_wave(step, item);
}

}  // namespace

void run_schedule(StepRun& step, const StepPlan& plan) { run_items(step, plan.items); }

}  // namespace espalier
