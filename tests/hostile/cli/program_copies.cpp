// The program in copies of one process, so that torch's library starts once for hundreds of runs (conftest.py).
//
// With words it is the program. Without, it reads requests from its standard input: the number of strings in a line,
// then each as a line with its length, and its bytes: a working folder, files for standard output and standard error,
// the program's words. It answers each with two lines: the process id of the copy that runs them, and in the end its
// exit status, or less than 0 for the signal that ended it.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "cli/interrupt.h"
#include "cli/program.h"

namespace {

using Words = std::vector<std::string>;

std::optional<Words> next_request(std::FILE* requests) {
  unsigned long strings = 0;
  if (std::fscanf(requests, "%lu", &strings) != 1 || strings < 3) return {};
  Words request(strings);
  for (std::string& text : request) {
    unsigned long length = 0;
    if (std::fscanf(requests, "%lu", &length) != 1) return {};
    std::fgetc(requests);  // the line's end
    text.resize(length);
    if (std::fread(text.data(), 1, length, requests) != length) return {};
  }
  return request;
}

// Does not come back.
void become_the_program(const Words& request) {
  const int in = open("/dev/null", O_RDONLY), out = open(request[1].c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600),
            err = open(request[2].c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  if (in < 0 || out < 0 || err < 0 || chdir(request[0].c_str()) != 0) _exit(126);
  // What a script starts in the background ignores interrupts, and its children would.
  for (const int interrupt : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) signal(interrupt, SIG_DFL);
  dup2(in, STDIN_FILENO), dup2(out, STDOUT_FILENO), dup2(err, STDERR_FILENO);
  close(in), close(out), close(err);
  espalier::cli::install_interrupt_handlers();
  const int status = espalier::cli::run_program({request.begin() + 3, request.end()});
  std::cout.flush();
  std::fflush(nullptr);
  _exit(status);  // without the end of torch's library, which takes longer than most runs
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) {
    espalier::cli::install_interrupt_handlers();
    return espalier::cli::run_program({argv + 1, argv + argc});
  }
  std::FILE* const requests = fdopen(fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 3), "r");
  std::FILE* const answers = fdopen(fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3), "w");
  while (const auto request = next_request(requests)) {
    const pid_t copy = fork();
    if (copy == 0) become_the_program(*request);
    std::fprintf(answers, "%d\n", static_cast<int>(copy));
    std::fflush(answers);
    int status = 0;
    if (copy > 0) waitpid(copy, &status, 0);
    std::fprintf(answers, "%d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
    std::fflush(answers);
  }
}
