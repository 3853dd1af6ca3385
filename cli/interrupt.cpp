#include "cli/interrupt.h"

#include <signal.h>
#include <unistd.h>

namespace espalier::cli {
namespace {

volatile sig_atomic_t received = 0;
volatile sig_atomic_t patient = 0;  // the work ends by itself

extern "C" void on_interrupt(int signal) {
  if (received != 0) _exit(128 + signal);
  received = signal;
  if (patient == 0) alarm(kGraceSeconds);
}

extern "C" void on_alarm(int) {
  constexpr char kText[] = "espalier: stopped by a signal\n";
  (void)!write(STDERR_FILENO, kText, sizeof kText - 1);  // the only way of writing that a handler has
  _exit(128 + received);
}

void handle(int signal, void (*handler)(int)) {
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;  // a read or write under way goes on: stopping is decided between them
  sigemptyset(&action.sa_mask);
  sigaction(signal, &action, nullptr);
}

bool ignored(int signal) {
  struct sigaction action {};
  return sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

}  // namespace

void install_interrupt_handlers() {
  // A process started in the background by a shell script has SIGINT ignored and must keep it so.
  if (!ignored(SIGINT)) handle(SIGINT, on_interrupt);
  handle(SIGTERM, on_interrupt);
  handle(SIGALRM, on_alarm);
}

int received_interrupt() { return received; }

void set_interrupt_mode(OnInterrupt mode) {
  patient = mode == OnInterrupt::stop ? 0 : 1;
  alarm(received != 0 && patient == 0 ? kGraceSeconds : 0);
}

void InterruptibleProgress::look() {
  if (received == 0) return;
  if (mode_ != OnInterrupt::finish) throw Interrupted{received};
  if (!told_) shown_.note("finishing the step, then saving; a second signal stops at once");
  told_ = true;
}

void InterruptibleProgress::begin(std::string_view task, std::int64_t total, std::string_view unit) {
  look();
  shown_.begin(task, total, unit);
}

void InterruptibleProgress::advance_to(std::int64_t done) {
  look();
  shown_.advance_to(done);
}

void InterruptibleProgress::on_interrupt(OnInterrupt mode) {
  mode_ = mode;
  set_interrupt_mode(mode);
}

}  // namespace espalier::cli
