// How OpenMP's threads wait for each other: asleep. GNU's OpenMP lets them spin for milliseconds, which on a machine
// with other work takes the processor from the very thread that is waited for (measured with two other processes on two
// processors: a step of 6 s took 29 to 55 s). OpenMP reads OMP_WAIT_POLICY when its library is loaded and never again,
// so the program starts itself anew with the variable set, before any library runs its initialisation: 5 ms. A value of
// the user's own stays.
#include <unistd.h>

#include <cstring>

namespace {

bool is_set(char** environment, const char* name) {
  const std::size_t length = std::strlen(name);
  for (char** entry = environment; *entry; ++entry)
    if (std::strncmp(*entry, name, length) == 0 && (*entry)[length] == '=') return true;
  return false;
}

// Runs before every constructor, so nothing but system calls and plain memory may be used here.
__attribute__((no_sanitize("address", "undefined"))) void sleep_while_waiting(int, char** arguments,
                                                                              char** environment) {
  static char policy[] = "OMP_WAIT_POLICY=passive";
  constexpr std::size_t kMost = 4096;
  static char* extended[kMost + 2];
  if (is_set(environment, "OMP_WAIT_POLICY") || is_set(environment, "GOMP_SPINCOUNT")) return;
  std::size_t count = 0;
  while (environment[count] && count < kMost) ++count;
  if (environment[count]) return;
  std::memcpy(extended, environment, count * sizeof(char*));
  extended[count] = policy;
  static char program[4096];
  if (readlink("/proc/self/exe", program, sizeof(program) - 1) <= 0) return;
  execve(program, arguments, extended);  // returns only where it is not allowed; then all is as before
}

__attribute__((section(".preinit_array"), used)) void (*const before_all)(int, char**, char**) = sleep_while_waiting;

}  // namespace
