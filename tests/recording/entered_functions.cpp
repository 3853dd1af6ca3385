// Preloaded by `make record`: which functions of Espalier a process enters, without compiling anything again. The first
// byte of every watched function becomes a breakpoint. Its trap puts the byte back and marks the function, so that each
// costs one trap between two notes and nothing else.
//
// The folder $ESPALIER_RECORDING holds, for each program or library NAME, NAME.functions (where they begin, 64 bits
// each, ascending, counted from where the file is loaded) and NAME.entered (a byte for each of them, shared by all
// processes). espalier_note_entered(test) adds a line to notes: the test and what was entered since the last one.
// Python code that was entered stands in python_files (tests/recording/sitecustomize.py).
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr std::uint8_t kBreakpoint = 0xCC;  // int3

struct Watched {
  std::string name;
  std::vector<std::uint8_t*> functions;  // ascending
  std::vector<std::uint8_t> first_bytes;
  std::uint8_t* entered = nullptr;
};

// A trap may look while another thread loads a library: entries never move, and the count grows last.
constinit Watched watched[16];
std::atomic<int> watched_count = 0;
constinit std::mutex watching;

std::string folder() {
  const char* const named = std::getenv("ESPALIER_RECORDING");
  return named == nullptr ? "" : named;
}

template <class T>
T* mapped(const std::string& path, int protection, std::size_t& count) {
  const int file = open(path.c_str(), (protection & PROT_WRITE) != 0 ? O_RDWR : O_RDONLY);
  struct stat facts = {};
  if (file < 0 || fstat(file, &facts) != 0 || facts.st_size == 0) return nullptr;
  void* const at = mmap(nullptr, static_cast<std::size_t>(facts.st_size), protection, MAP_SHARED, file, 0);
  close(file);
  count = static_cast<std::size_t>(facts.st_size) / sizeof(T);
  return at == MAP_FAILED ? nullptr : static_cast<T*>(at);
}

void arm(const Watched& one) {
  for (std::uint8_t* const function : one.functions)
    if (*function != kBreakpoint) *function = kBreakpoint;
}

void on_trap(int, siginfo_t*, void* context) {
  greg_t& next = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP];
  auto* const function = reinterpret_cast<std::uint8_t*>(next - 1);
  for (int i = 0; i < watched_count; ++i) {
    const Watched& one = watched[i];
    const auto found = std::lower_bound(one.functions.begin(), one.functions.end(), function);
    if (found == one.functions.end() || *found != function) continue;
    const auto index = static_cast<std::size_t>(found - one.functions.begin());
    one.entered[index] = 1;
    *function = one.first_bytes[index];
    next -= 1;
    return;
  }
  signal(SIGTRAP, SIG_DFL);  // somebody else's breakpoint
}

int watch(dl_phdr_info* library, std::size_t, void*) {
  std::error_code none;
  const std::string path = library->dlpi_name[0] != '\0'
                               ? library->dlpi_name
                               : std::filesystem::read_symlink("/proc/self/exe", none).string();
  const std::string name = std::filesystem::path(path).filename();
  const int count = watched_count;
  if (count == std::ssize(watched) ||
      std::any_of(watched, watched + count, [&](const Watched& w) { return w.name == name; }))
    return 0;
  std::size_t functions = 0, bytes = 0;
  const auto* const offsets = mapped<std::uint64_t>(folder() + '/' + name + ".functions", PROT_READ, functions);
  std::uint8_t* const entered = mapped<std::uint8_t>(folder() + '/' + name + ".entered", PROT_READ | PROT_WRITE, bytes);
  if (offsets == nullptr || entered == nullptr || functions != bytes) return 0;
  Watched& made = watched[count];
  made.entered = entered;
  for (std::size_t i = 0; i < functions; ++i) {
    made.functions.push_back(reinterpret_cast<std::uint8_t*>(library->dlpi_addr + offsets[i]));
    made.first_bytes.push_back(*made.functions.back());
  }
  for (int i = 0; i < library->dlpi_phnum; ++i) {
    const ElfW(Phdr)& part = library->dlpi_phdr[i];
    if (part.p_type != PT_LOAD || (part.p_flags & PF_X) == 0) continue;
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const std::uintptr_t from = (library->dlpi_addr + part.p_vaddr) & ~(page - 1);
    const std::uintptr_t to = library->dlpi_addr + part.p_vaddr + part.p_memsz;
    if (mprotect(reinterpret_cast<void*>(from), to - from, PROT_READ | PROT_WRITE | PROT_EXEC) != 0) return 0;
  }
  made.name = name;
  watched_count = count + 1;
  arm(made);
  return 0;
}

void watch_what_is_loaded() {
  const std::lock_guard<std::mutex> alone(watching);
  if (!folder().empty()) dl_iterate_phdr(watch, nullptr);
}

__attribute__((constructor)) void begin() {
  struct sigaction action = {};
  action.sa_sigaction = on_trap;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGTRAP, &action, nullptr);
  watch_what_is_loaded();
}

}  // namespace

// A library that is loaded later is watched from then on.
extern "C" __attribute__((visibility("default"))) void* dlopen(const char* file, int mode) {
  static const auto original = reinterpret_cast<void* (*)(const char*, int)>(dlsym(RTLD_NEXT, "dlopen"));
  void* const library = original(file, mode);
  if (library != nullptr && file != nullptr) watch_what_is_loaded();
  return library;
}

// A thread that blocked traps would end the process at its first function.
extern "C" __attribute__((visibility("default"))) int pthread_sigmask(int how, const sigset_t* set,
                                                                      sigset_t* old) noexcept {
  static const auto original =
      reinterpret_cast<int (*)(int, const sigset_t*, sigset_t*)>(dlsym(RTLD_NEXT, "pthread_sigmask"));
  if (set == nullptr) return original(how, set, old);
  sigset_t without = *set;
  sigdelset(&without, SIGTRAP);
  return original(how, &without, old);
}

// Seconds of processors, of this process and of those that it has waited for.
double seconds_so_far() {
  double seconds = 0;
  for (const int of : {RUSAGE_SELF, RUSAGE_CHILDREN}) {
    rusage usage = {};
    getrusage(of, &usage);
    for (const timeval& time : {usage.ru_utime, usage.ru_stime})
      seconds += static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  }
  return seconds;
}

double elsewhere = 0;
constexpr double kWaits = 3;  // WAITS of tools/run_tests.py

// Adds seconds of processors to the next note: of processes that this one does not wait for.
extern "C" __attribute__((visibility("default"))) void espalier_spent_elsewhere(double seconds) {
  elsewhere += seconds;
}

// "test<TAB>seconds<TAB>NAME:index,index,...<TAB>NAME:...<TAB>python:file,file,..."
extern "C" __attribute__((visibility("default"))) void espalier_note_entered(const char* test) {
  namespace fs = std::filesystem;
  std::ostringstream line;
  static double before = 0;
  static auto began = std::chrono::steady_clock::now();
  const double now = seconds_so_far(),
               passed = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  line << test << '\t' << std::max(now - before + elsewhere, passed / kWaits);
  elsewhere = 0;
  for (const fs::directory_entry& each : fs::directory_iterator(folder())) {
    if (each.path().extension() != ".entered") continue;
    std::size_t count = 0;
    std::uint8_t* const entered = mapped<std::uint8_t>(each.path(), PROT_READ | PROT_WRITE, count);
    if (entered == nullptr) continue;
    char separator = ':';
    for (std::size_t i = 0; i < count; ++i) {
      if (entered[i] == 0) continue;
      if (separator == ':') line << '\t' << each.path().stem().string();
      line << separator << i;
      separator = ',';
      entered[i] = 0;
    }
    munmap(entered, count);
  }
  const std::string python = folder() + "/python_files";
  if (std::ifstream files(python); files) {
    char separator = ':';
    for (std::string file; std::getline(files, file); separator = ',')
      line << (separator == ':' ? "\tpython" : "") << separator << file;
    std::ofstream(python, std::ios::trunc);
  }
  std::ofstream(folder() + "/notes", std::ios::app) << line.str() << '\n';
  for (int i = 0; i < watched_count; ++i) arm(watched[i]);
  before = seconds_so_far();
  began = std::chrono::steady_clock::now();
}
