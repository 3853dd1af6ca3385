// The deliberate faults that $ESPALIER_FAULT names ("one" or "one,that stands together with it"), for a whole process;
// with $ESPALIER_FAULT_ONCE the first of them only the first time. In builds with ESPALIER_FAULTS
// (cmake/EspalierFaults.cmake).
//
// Under `make faults` the folder $ESPALIER_RECORDING holds faults.names, one a line, and faults.entered, a byte for
// each of them, which all processes share: that of a fault whose line is reached becomes 1
// (tests/recording/entered_functions.cpp notes them under the name of the test).
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>
#include <unordered_map>

namespace espalier::mutation {
namespace {

class Reached {
 public:
  Reached() {
    const char* const named = std::getenv("ESPALIER_RECORDING");
    if (named == nullptr) return;
    const std::string folder = named;
    std::ifstream names(folder + "/faults.names");
    for (std::string name; std::getline(names, name);) number_.emplace(name, number_.size());
    const int file = open((folder + "/faults.entered").c_str(), O_RDWR);
    if (number_.empty() || file < 0) return;
    void* const at = mmap(nullptr, number_.size(), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (at != MAP_FAILED) entered_ = static_cast<std::uint8_t*>(at);
  }
  void mark(const char* name) const {
    if (entered_ == nullptr) return;
    thread_local std::unordered_map<const char*, std::uint8_t*> known;  // a line's own text, asked in inner loops
    std::uint8_t*& byte = known[name];
    if (byte == nullptr) {
      const auto found = number_.find(name);
      if (found == number_.end()) return;
      byte = entered_ + found->second;
    }
    *byte = 1;
  }

 private:
  std::unordered_map<std::string, std::size_t> number_;
  std::uint8_t* entered_ = nullptr;
};

}  // namespace

bool active(const char* name) {
  static const Reached reached;
  reached.mark(name);
  static const char* const named = std::getenv("ESPALIER_FAULT");
  if (named == nullptr) return false;
  static const std::string all = named;
  static const std::string first = all.substr(0, all.find(',')),
                           second = all.substr(std::min(all.size(), first.size() + 1));
  static const bool once = std::getenv("ESPALIER_FAULT_ONCE") != nullptr;
  static std::atomic<bool> done = false;
  if (name == second) return true;
  return name == first && (!done.exchange(true) || !once);
}

}  // namespace espalier::mutation
