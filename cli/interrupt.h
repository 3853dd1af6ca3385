// Ctrl-C and SIGTERM: the work is stopped where it reports progress, so that nothing is left half written, or where it
// says itself that it can save (espalier/metrics/progress.h).
//
// Temporary files are removed as the stack unwinds. Work under OnInterrupt::stop that does not report within
// kGraceSeconds is ended at once, and so is any work by a second signal.
#pragma once

#include "espalier/metrics/progress.h"

namespace espalier::cli {

constexpr unsigned kGraceSeconds = 3;

void install_interrupt_handlers();
void set_interrupt_mode(OnInterrupt mode);
int received_interrupt();  // 0: none

// Passes everything on, and stops the work on an interrupt.
class InterruptibleProgress final : public Progress {
 public:
  explicit InterruptibleProgress(Progress& shown) : shown_(shown) {}
  void begin(std::string_view task, std::int64_t total, std::string_view unit) override;
  void advance_to(std::int64_t done) override;
  void end() override { shown_.end(); }
  void note(std::string_view text) override { shown_.note(text); }
  void part(std::string_view text) override { shown_.part(text); }
  void on_interrupt(OnInterrupt mode) override;
  int interrupted() const override { return received_interrupt(); }

 private:
  void look();

  Progress& shown_;
  OnInterrupt mode_ = OnInterrupt::stop;
  bool told_ = false;
};

}  // namespace espalier::cli
