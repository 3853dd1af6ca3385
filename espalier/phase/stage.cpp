#include "espalier/phase/stage.h"

#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/phase/agreed_program.h"
#include "espalier/phase/books.h"
#include "espalier/phase/item_run.h"
#include "espalier/phase/penalty_values.h"

namespace espalier {
namespace {

class Executor {
 public:
  RunResult result;

  Executor(const StepRun& step, const Program& program, std::int64_t waves)
      : step_(step),
        waves_(static_cast<std::size_t>(waves)),
        books_(step, regions_, result),
        penalties_(step, program),
        backwards_left_(count_backwards(program)) {
    // One region is enough where no wave outlives its event: the arena itself.
    for (std::int64_t i = 0; waves > 1 && i < waves; ++i)
      regions_.push_back(std::make_unique<Arena>(step.arena.limit(), step.decoder.device()));
  }
  // After an error the innermost trunk gives its part of the arena back first; a deque would begin with the outermost.
  ~Executor() {
    waves_.clear();
    while (!open_.empty()) open_.pop_back();
  }

  void take(const Step& step) {
    const bool forward = step.pass == Pass::forward;
    if (step.own == nullptr) return forward ? join(step) : end_join(step);
    if (step.kind == ItemKind::wave) return forward ? begin_wave(step) : end_wave(step);
    return forward ? open_trunk(step) : close_trunk(step);
  }

  void finish() {
    penalties_.add_up();
    books_.finish();
  }

 private:
  // What an item took from the arena goes back when it has ended, a trunk after everything below it.
  struct OpenItem {
    OpenItem(const StepRun& step, const PlanItem& item, Arena& arena) : scope(arena), run(step, item, arena) {}

    ArenaScope scope;
    ItemRun run;
  };

  // Without rows, in what others run.
  void join(const Step& step) {
    books_.book(step, [&] { espalier::join(step_, Pass::forward, step.on_path); });
  }
  void end_join(const Step& step) {
    if (step_.trains())
      books_.book(step, [&] { run_backward([&] { espalier::join(step_, Pass::backward, step.on_path); }); });
  }

  void open_trunk(const Step& step) {
    trim();
    ItemRun& run = open_.emplace_back(step_, *step.own, step_.arena).run;
    step_.path.push(step.own->set.rows, step.reports, run.states());
    books_.book(step, [&] { run.forward(); });
    result.trunk_rows += run.rows();
    ++result.trunk_forwards;
  }

  void begin_wave(const Step& step) {
    const auto at = static_cast<std::size_t>(step.region);
    ESPALIER_INTERNAL(!waves_.at(at), "two waves in flight in one region");
    if (step.last_below) open_.back().run.ask_ahead();  // what was offloaded is fetched while it runs
    books_.book(step, [&] {
      ItemRun& run = waves_[at].emplace(step_, *step.own, regions_.empty() ? step_.arena : *regions_[at]).run;
      run.forward();
      result.wave_rows += run.rows();
    });
    if (!regions_.empty()) regions_[at]->trim();  // until its backward it holds what it saves
  }

  void end_wave(const Step& step) {
    const auto at = static_cast<std::size_t>(step.region);
    if (step_.trains()) books_.book(step, [&] { add_backward(waves_[at]->run); });
    waves_[at].reset();
    if (!regions_.empty()) regions_[at]->trim();
    if (step_.on_rows) step_.on_rows(step.rows_behind);
  }

  void close_trunk(const Step& step) {
    trim();
    ItemRun& run = open_.back().run;
    run.ask_ahead();
    if (step.last_below) open_[open_.size() - 2].run.ask_ahead();
    if (step_.trains()) books_.book(step, [&] { add_backward(run); });
    step_.path.pop();
    open_.pop_back();
    trim();
  }

  void add_backward(ItemRun& run) {
    run_backward([&] { run.add_backward(penalties_.next()); });
  }

  // Own or joined: behind the last of them nothing is added to the gradients.
  template <class Work>
  void run_backward(Work&& work) {
    if (--backwards_left_ > 0) return work();
    step_.gradients->begin_last_backward();
    result.last_backward_began = Timer::steady_seconds();
    work();
    result.last_backward_ended = Timer::steady_seconds();
  }

  // Where something is offloaded, pages above the stack are not left to it: they would be held beside those below.
  void trim() {
    if (step_.spill != nullptr || step_.path.sleeps()) step_.arena.trim();
  }

  const StepRun& step_;
  std::vector<std::unique_ptr<Arena>> regions_;  // of waves in flight; none: the arena serves them
  std::deque<OpenItem> open_;                    // trunks, innermost last
  std::vector<std::optional<OpenItem>> waves_;   // in flight, by region
  Books books_;
  PenaltyValues penalties_;
  std::int64_t backwards_left_;
};

}  // namespace

RunResult run_stage(const StepRun& step, const StepPlan& plan) {
  const Mesh& mesh = step.decoder.mesh();
  const Program program = agreed_program(mesh, plan, step.trains());
  Executor executor(step, program, waves_in_flight(mesh.degrees, mesh.place(), step.trains()));
  for (const Step& next : program) executor.take(next);
  executor.finish();
  return executor.result;
}

}  // namespace espalier
