// The progress of a long run whose parts also report: one bar for the run, which names the running part.
#pragma once

#include <string>

#include "espalier/metrics/progress.h"

namespace espalier {

// Shows the progress of a part behind the run's bar, "generating 45 %", without moving the bar; every report
// draws the bar again and lets an interrupt through.
class PartProgress final : public Progress {
 public:
  explicit PartProgress(Progress& run) : run_(run) {}

  // The run's own bar: begun once, advanced by the run itself.
  void begin_run(std::string_view task, std::int64_t total, std::string_view unit) { run_.begin(task, total, unit); }
  void advance_run_to(std::int64_t done) { run_.advance_to(done_ = done); }

  void begin(std::string_view task, std::int64_t total, std::string_view) override {
    task_ = task, total_ = total;
    advance_to(0);
  }
  void advance_to(std::int64_t done) override {
    run_.part(total_ > 0 ? task_ + ' ' + std::to_string(100 * done / total_) + " %" : task_);
    run_.advance_to(done_);
  }
  void end() override { run_.part(""); }
  void note(std::string_view text) override { run_.note(text); }
  void on_interrupt(OnInterrupt mode) override { run_.on_interrupt(mode); }
  int interrupted() const override { return run_.interrupted(); }

 private:
  Progress& run_;
  std::string task_;
  std::int64_t total_ = 0, done_ = 0;
};

}  // namespace espalier
