// Asks changed kernels what kernel_checks.h has, until one answer is wrong. mutate_kernels.py writes the kernels with
// all their changes in them, puts them before this program's own (LD_PRELOAD) and gives orders, a line each:
//   measure GROUP..   runs the checks (of these groups alone; GROUP:WORD: those with the word in their name) of the
//                     unchanged kernels: "check NUMBER SECONDS NAME" and, on the next line, the numbers of the changes
//                     that it came by; "problem NAME: what" where one fails
//   try ID N:LIMIT..  runs these checks of the kernels with change ID, each with LIMIT seconds of processor time:
//                     "noticed N what" at the first that fails, ends or hangs, or "survived"
// Each trial has a process of its own, which has the inputs and the CPU's answers from its parent.
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <exception>
#include <iostream>
#include <iterator>
#include <set>
#include <sstream>

#include "tests/cuda/hopper/hopper_checks.h"
#include "tests/cuda/kernel_checks.h"

namespace espalier::testing {
namespace {

// Functions that the kernels with changes in them export; absent where one change was compiled alone.
struct Changes {
  void (*choose)(int) = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "espalier_choose_change"));
  int (*count)() = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "espalier_change_count"));
  unsigned char* (*met)() = reinterpret_cast<unsigned char* (*)()>(dlsym(RTLD_DEFAULT, "espalier_changes_met"));
};

struct Trial {
  int check = -1;
  bool noticed = false, ended = false;
  char what[160] = "";
};

std::string problem_of(const KernelCheck& check) {
  try {
    return check.problem();
  } catch (const std::exception& error) {
    return error.what();
  }
}

double processor_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

void measure(const std::vector<KernelCheck>& checks, const Changes& changes, std::istringstream& order) {
  const std::set<std::string> groups{std::istream_iterator<std::string>(order), {}};
  const int count = changes.count != nullptr ? changes.count() : 0;
  for (std::size_t n = 0; n < checks.size(); ++n) {
    if (count > 0) std::memset(changes.met(), 0, static_cast<std::size_t>(count));
    const double begun = processor_seconds();
    const bool asked =
        groups.empty() || std::ranges::any_of(groups, [&](const std::string& group) {
          const std::size_t colon = std::min(group.find(':'), group.size());
          return checks[n].group == group.substr(0, colon) &&
                 checks[n].name.find(group.substr(std::min(colon + 1, group.size()))) != std::string::npos;
        });
    const std::string problem = asked ? problem_of(checks[n]) : "";
    std::cout << "check " << n << " " << processor_seconds() - begun << " " << checks[n].name << "\n";
    for (int id = 0; id < count; ++id)
      if (changes.met()[id] != 0) std::cout << id << " ";
    std::cout << std::endl;
    if (!problem.empty()) std::cout << "problem " << checks[n].name << ": " << problem << std::endl;
  }
  std::cout << "measured" << std::endl;
}

void limit_processor(double seconds) {
  itimerval limit{};
  limit.it_value.tv_sec = static_cast<long>(seconds);
  limit.it_value.tv_usec = static_cast<long>((seconds - std::floor(seconds)) * 1e6);
  setitimer(ITIMER_PROF, &limit, nullptr);
}

// In the child.
void run_trial(const std::vector<KernelCheck>& checks, const Changes& changes, int id, std::istringstream& order,
               Trial& trial) {
  rlimit memory{std::size_t{6} << 30, std::size_t{6} << 30};
  setrlimit(RLIMIT_DATA, &memory);
  if (changes.choose != nullptr) changes.choose(id);
  int n = 0;
  char colon = 0;
  double limit = 0;
  while (order >> n >> colon >> limit) {
    trial.check = n;
    limit_processor(limit);
    const std::string problem = problem_of(checks.at(static_cast<std::size_t>(n)));
    if (problem.empty()) continue;
    trial.noticed = true;
    std::snprintf(trial.what, sizeof(trial.what), "%s", problem.c_str());
    break;
  }
  trial.ended = true;
}

void serve() {
  const Changes changes;
  std::vector<KernelCheck> checks = kernel_checks();
  for (KernelCheck& check : hopper_checks()) checks.push_back(std::move(check));
  // Other orders of threads show what is a race, which any order shows here.
  std::erase_if(checks, [](const KernelCheck& check) { return check.kind == KernelCheck::Kind::orders; });
  auto* const trial =
      static_cast<Trial*>(mmap(nullptr, sizeof(Trial), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  rlimit no_core{0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream order(line);
    std::string verb;
    order >> verb;
    if (verb == "measure") {
      measure(checks, changes, order);
      continue;
    }
    int id = 0, status = 0;
    order >> id;
    *trial = Trial{};
    const pid_t child = fork();
    if (child == 0) {
      run_trial(checks, changes, id, order, *trial);
      _exit(0);
    }
    waitpid(child, &status, 0);
    std::string what = trial->what;
    if (!trial->ended) what = WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : "ended";
    for (char& c : what)
      if (c == '\n') c = ' ';
    if (trial->noticed || !trial->ended)
      std::cout << "noticed " << trial->check << " " << what << std::endl;
    else
      std::cout << "survived" << std::endl;
  }
}

}  // namespace
}  // namespace espalier::testing

int main() {
  unsetenv("LD_PRELOAD");  // the programs that name a fault's place run without the kernels
  espalier::testing::serve();
  return 0;
}
