// Ctrl-C and SIGTERM: the work is stopped where it reports progress, so that nothing is left half written.
//
// The first signal is noticed at the next progress report, which throws Interrupted; temporary files are removed as the
// stack unwinds. Work that does not report within kGraceSeconds is ended at once, and so it is by a second signal.
#pragma once

#include "espalier/observe/progress.h"

namespace espalier::cli {

constexpr unsigned kGraceSeconds = 3;

struct Interrupted {
  int signal;
  int exit_code() const { return 128 + signal; }  // what shells expect
};

void install_interrupt_handlers();
void throw_if_interrupted();

// Passes everything on, and stops the work on an interrupt.
class InterruptibleProgress final : public Progress {
 public:
  explicit InterruptibleProgress(Progress& shown) : shown_(shown) {}
  void begin(std::string_view task, std::int64_t total, std::string_view unit) override {
    throw_if_interrupted();
    shown_.begin(task, total, unit);
  }
  void advance_to(std::int64_t done) override {
    throw_if_interrupted();
    shown_.advance_to(done);
  }
  void end() override { shown_.end(); }
  void note(std::string_view text) override { shown_.note(text); }

 private:
  Progress& shown_;
};

}  // namespace espalier::cli
