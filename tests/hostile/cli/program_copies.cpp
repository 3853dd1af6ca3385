// The program in copies of one process, so that torch's library starts once for hundreds of runs (conftest.py).
//
// With words it is the program. Without, it reads requests from its standard input: the number of strings in a line,
// then each as a line with its length, and its bytes: a working folder, files for standard output and standard error,
// the program's words. It answers each with two lines: the process id of the copy that runs them, and in the end its
// exit status, or less than 0 for the signal that ended it, with the seconds of processors that it took.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "cli/interrupt.h"
#include "cli/program.h"
#include "tests/hostile/cli/program_copy.h"

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

double seconds_of(const timeval& time) {
  return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
}

int open_to_write(const std::string& path) { return open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600); }

}  // namespace

using espalier::testing::become_the_program;
using espalier::testing::enter_copy;

int main(int argc, char** argv) {
  if (argc > 1) {
    espalier::cli::install_interrupt_handlers();
    return espalier::cli::run_program({argv + 1, argv + argc});
  }
  std::FILE* const requests = fdopen(fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 3), "r");
  std::FILE* const answers = fdopen(fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3), "w");
  while (const auto request = next_request(requests)) {
    const pid_t copy = fork();
    if (copy == 0) {
      enter_copy((*request)[0], open("/dev/null", O_RDONLY), open_to_write((*request)[1]),
                 open_to_write((*request)[2]));
      become_the_program({request->begin() + 3, request->end()});
    }
    std::fprintf(answers, "%d\n", static_cast<int>(copy));
    std::fflush(answers);
    int status = 0;
    rusage used{};
    if (copy > 0) wait4(copy, &status, 0, &used);
    std::fprintf(answers, "%d %.3f\n", WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status),
                 seconds_of(used.ru_utime) + seconds_of(used.ru_stime));
    std::fflush(answers);
  }
}
