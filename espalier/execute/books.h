// Records the time, the peak and the bytes of every step of a rank program.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "espalier/execute/step_run.h"
#include "espalier/program/program.h"

namespace espalier {

class Books {
 public:
  // `regions`: arenas of waves in flight, beside the step's own. All must outlive the object.
  Books(const StepRun& step, const std::vector<std::unique_ptr<Arena>>& regions, RunResult& result)
      : step_(step), regions_(regions), result_(result) {}

  // Runs the work of a step and records it.
  template <class Work>
  void book(const Step& step, Work&& work) {
    const Begun begun = begin();
    std::forward<Work>(work)();
    end(step, begun);
  }

  // Asks the device how long the work took. Called once at the end, because asking waits for the device.
  void finish();

 private:
  struct Begun {
    Device::Moment moment;
    double waited;
    AxisBytes bytes;
    std::int64_t ahead;
  };
  struct Span {
    double* seconds;
    Device::Moment begin, end;
  };
  Begun begin();
  void end(const Step& step, const Begun& begun);
  std::int64_t bytes_ahead() const { return step_.trains() ? step_.gradients->given_ahead() : 0; }

  const StepRun& step_;
  const std::vector<std::unique_ptr<Arena>>& regions_;
  RunResult& result_;
  std::vector<Span> spans_;
};

}  // namespace espalier
