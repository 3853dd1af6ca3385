#include "espalier/execute/stage.h"

#include "espalier/execute/agreed_program.h"
#include "espalier/execute/books.h"
#include "espalier/execute/open_items.h"
#include "espalier/execute/penalty_values.h"

namespace espalier {
namespace {

class Executor {
 public:
  RunResult result;

  Executor(const StepRun& step, const Program& program, std::int64_t waves)
      : step_(step),
        items_(step, waves),
        books_(step, items_.regions(), result),
        penalties_(step, program),
        backwards_left_(count_backwards(program)) {}

  void take(const Step& step) {
    const bool forward = step.pass == Pass::forward;
    if (step.own == nullptr) return forward ? join_forward(step) : join_backward(step);
    if (step.kind == ItemKind::wave) return forward ? begin_wave(step) : end_wave(step);
    return forward ? open_trunk(step) : close_trunk(step);
  }

  void finish() {
    penalties_.add_up();
    books_.finish();
  }

 private:
  // Without rows, in what others run.
  void join_forward(const Step& step) {
    books_.book(step, [&] { join(step_, Pass::forward, step.on_path); });
  }
  void join_backward(const Step& step) {
    if (step_.trains()) books_.book(step, [&] { run_backward([&] { join(step_, Pass::backward, step.on_path); }); });
  }

  void open_trunk(const Step& step) {
    ItemRun& run = items_.open_trunk(*step.own, step.reports);
    books_.book(step, [&] { run.forward(); });
    result.trunk_rows += run.rows();
    ++result.trunk_forwards;
    report(step);
  }

  void begin_wave(const Step& step) {
    if (step.last_below) items_.trunk().ask_ahead();  // what was offloaded is fetched while the wave runs
    books_.book(step, [&] {
      ItemRun& run = items_.begin_wave(*step.own, step.region);
      run.forward();
      result.wave_rows += run.rows();
    });
    items_.trim_wave(step.region);
  }

  void end_wave(const Step& step) {
    if (step_.trains()) books_.book(step, [&] { add_backward(items_.wave(step.region)); });
    items_.end_wave(step.region);
    report(step);
  }

  void close_trunk(const Step& step) {
    items_.trim();
    items_.trunk().ask_ahead();
    if (step.last_below) items_.trunk(1).ask_ahead();
    if (step_.trains()) books_.book(step, [&] { add_backward(items_.trunk()); });
    items_.close_trunk();
    report(step);
  }

  void report(const Step& step) const {
    if (step_.on_rows) step_.on_rows(step.rows_behind);
  }

  void add_backward(ItemRun& run) {
    run_backward([&] { run.add_backward(penalties_.next()); });
  }

  // Own or joined: after the last backward nothing is added to the gradients.
  template <class Work>
  void run_backward(Work&& work) {
    if (--backwards_left_ > 0) return work();
    step_.gradients->begin_last_backward();
    result.last_backward_began = Timer::steady_seconds();
    work();
    result.last_backward_ended = Timer::steady_seconds();
  }

  const StepRun& step_;
  OpenItems items_;
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
