#include "tests/hostile/cli/program_copy.h"

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <iostream>

#include "cli/interrupt.h"
#include "cli/program.h"

namespace espalier::testing {

void enter_copy(const std::string& folder, int in, int out, int err) {
  if (in < 0 || out < 0 || err < 0 || chdir(folder.c_str()) != 0) _exit(126);
  // Processes that a script starts in the background ignore interrupts, and their children would.
  for (const int interrupt : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) signal(interrupt, SIG_DFL);
  dup2(in, STDIN_FILENO), dup2(out, STDOUT_FILENO), dup2(err, STDERR_FILENO);
  close(in), close(out), close(err);
}

void become_the_program(const std::vector<std::string>& words) {
  cli::install_interrupt_handlers();
  const int code = cli::run_program(words);
  std::cout.flush();
  std::fflush(nullptr);
  _exit(code);  // without the end of torch's library, which takes longer than most runs
}

}  // namespace espalier::testing
