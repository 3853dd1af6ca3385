#include "cli/interrupt.h"

#include <signal.h>
#include <unistd.h>

namespace espalier::cli {
namespace {

volatile sig_atomic_t received = 0;

extern "C" void on_interrupt(int signal) {
  if (received != 0) _exit(128 + signal);
  received = signal;
  alarm(kGraceSeconds);
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
  // A process started in the background by a shell script has SIGINT ignored and shall keep it so.
  if (!ignored(SIGINT)) handle(SIGINT, on_interrupt);
  handle(SIGTERM, on_interrupt);
  handle(SIGALRM, on_alarm);
}

void throw_if_interrupted() {
  if (received != 0) throw Interrupted{received};
}

}  // namespace espalier::cli
