// The deliberate faults that $ESPALIER_FAULT names ("one" or "one,that stands together with it"), for a whole process;
// with $ESPALIER_FAULT_ONCE the first of them only the first time. In builds with ESPALIER_FAULTS
// (cmake/EspalierFaults.cmake).
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string>

namespace espalier::mutation {

bool active(const char* name) {
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
