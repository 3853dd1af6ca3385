// How OpenMP's threads wait for each other: they look a thousand times, some microseconds, then sleep. By default GNU's
// OpenMP spins for milliseconds, which on a machine with other work takes the processor from the very thread that is
// waited for; without any spinning a small model spends its time falling asleep and waking up (`verify` of a two-block
// model, two processors: 50 s without spinning, 7 s so, 11 s by default; beside two busy processes 24 s, 4 s of a
// smaller batch, and 78 s with ten times the count). OpenMP reads GOMP_SPINCOUNT when its library is loaded and never
// again, so the program starts itself anew with the variable set, before any library runs its initialisation: 5 ms. A
// value of the user's own stays.
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
__attribute__((no_sanitize("address", "undefined"))) void wait_briefly(int, char** arguments, char** environment) {
  static char spins[] = "GOMP_SPINCOUNT=1000";
  constexpr std::size_t kMost = 4096;
  static char* extended[kMost + 2];
  if (is_set(environment, "OMP_WAIT_POLICY") || is_set(environment, "GOMP_SPINCOUNT")) return;
  std::size_t count = 0;
  while (environment[count] && count < kMost) ++count;
  if (environment[count]) return;
  std::memcpy(extended, environment, count * sizeof(char*));
  extended[count] = spins;
  static char program[4096];
  if (readlink("/proc/self/exe", program, sizeof(program) - 1) <= 0) return;
  execve(program, arguments, extended);  // returns only where it is not allowed; then all is as before
}

__attribute__((section(".preinit_array"), used)) void (*const before_all)(int, char**, char**) = wait_briefly;

}  // namespace
