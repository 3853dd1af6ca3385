// How OpenMP's threads wait for each other: they look a thousand times, some microseconds, then sleep. By default GNU's
// OpenMP spins for milliseconds, which on a machine with other work takes the processor from the very thread that is
// waited for; without any spinning a small model spends its time falling asleep and waking up (`verify` of a two-block
// model, two processors: 50 s without spinning, 7 s so, 11 s by default; beside two busy processes 24 s, 4 s of a
// smaller batch, and 78 s with ten times the count). OpenMP asks for GOMP_SPINCOUNT once, while its library is being
// initialised, before anything of this program runs and with no function that could say it later. So the program
// answers that question: every library finds this getenv before the C library's, which it equals but for the one name.
// A wait policy or count of the user's own stays. Where OpenMP asks in another way, its default holds.
#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace {

// Called before the sanitizers and the standard library are ready: plain memory and nothing else.
__attribute__((no_sanitize("address", "undefined"))) char* value_of(const char* name) {
  const std::size_t length = std::strlen(name);
  if (environ == nullptr || length == 0) return nullptr;
  for (char** entry = environ; *entry != nullptr; ++entry)
    if (std::strncmp(*entry, name, length) == 0 && (*entry)[length] == '=') return *entry + length + 1;
  return nullptr;
}

}  // namespace

extern "C" __attribute__((no_sanitize("address", "undefined"))) char* getenv(const char* name) noexcept {
  static char spins[] = "1000";
  char* const value = value_of(name);
  const bool asked = value == nullptr && std::strcmp(name, "GOMP_SPINCOUNT") == 0;
  return asked && value_of("OMP_WAIT_POLICY") == nullptr ? spins : value;
}
