#include "espalier/phase/one_after_another.h"

#include <algorithm>
#include <deque>

#include "espalier/phase/item_run.h"
#include "espalier/phase/schedule.h"

namespace espalier {
namespace {

std::int64_t items_below(const PlanItem& trunk) {
  std::int64_t count = 0;
  for (const PlanItem& item : trunk.below) count += 1 + items_below(item);
  return count;
}

class OneAfterAnother : public Executor {
 public:
  explicit OneAfterAnother(const StepRun& step) : step_(step) {}
  // After an error the innermost trunk gives its part of the arena back first; a deque would begin with the outermost.
  ~OneAfterAnother() override {
    while (!open_.empty()) open_.pop_back();
  }

  void open_trunk(const PlanItem& item) override {
    OpenTrunk& trunk = open_.emplace_back(step_, item);
    step_.path.push(item.set.rows, items_below(item));
    book(result.seconds.trunk_forward, result.arena_bytes.a, [&] { trunk.run.forward(); });
    result.trunk_rows += trunk.run.rows();
    ++result.trunk_forwards;
  }

  void run_wave(const PlanItem& item) override {
    book(result.seconds.waves, result.arena_bytes.b, [&] {
      const ArenaScope scope(step_.arena);
      ItemRun wave(step_, item);
      wave.forward();
      if (step_.trains()) wave.backward();
      result.wave_rows += wave.rows();
    });
    if (step_.on_rows) step_.on_rows(result.trunk_rows + result.wave_rows);
  }

  void close_trunk(const PlanItem&) override {
    OpenTrunk& trunk = open_.back();
    if (step_.trains()) book(result.seconds.trunk_backward, result.arena_bytes.c, [&] { trunk.run.backward(); });
    step_.path.pop();
    open_.pop_back();
  }

  RunResult result;

 private:
  // What a trunk took from the arena goes back when it is closed, after everything below it.
  struct OpenTrunk {
    OpenTrunk(const StepRun& step, const PlanItem& item) : scope(step.arena), run(step, item) {}

    ArenaScope scope;
    ItemRun run;
  };

  // Runs one phase of one item and books its time and its peak.
  template <class Work>
  void book(double& seconds, std::int64_t& peak, Work&& work) {
    const double begin = step_.arena.device().seconds();
    step_.arena.reset_high_water();
    work();
    peak = std::max(peak, step_.arena.high_water());
    seconds += step_.arena.device().seconds() - begin;
  }

  const StepRun& step_;
  std::deque<OpenTrunk> open_;  // innermost last
};

}  // namespace

RunResult run_one_after_another(const StepRun& step, const StepPlan& plan) {
  OneAfterAnother executor(step);
  run_schedule(plan.items, executor);
  return executor.result;
}

}  // namespace espalier
