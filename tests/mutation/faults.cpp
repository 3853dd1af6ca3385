#include "tests/mutation/faults.h"

#include <atomic>

namespace espalier::testing {
namespace {

const Fault* on = nullptr;
std::atomic<int> times_reached = 0;  // ranks are threads
std::atomic<bool> once_done = false;

}  // namespace

const std::vector<Fault>& all_faults() {
  static const std::vector<Fault> faults = {
#include "fault_list.inc"
  };
  return faults;
}

SwitchedOn::SwitchedOn(const Fault& fault) { on = &fault, times_reached = 0; }
SwitchedOn::~SwitchedOn() { on = nullptr; }
void SwitchedOn::begin_check() { once_done = false; }
int SwitchedOn::times() const { return times_reached; }

}  // namespace espalier::testing

namespace espalier::mutation {

// True if the fault of this name is switched on: the engine's faulty copies ask.
bool active(const char* name) {
  using namespace espalier::testing;
  if (!on) return false;
  if (on->together_with == name) return true;
  if (on->name != name) return false;
  ++times_reached;
  const bool again = once_done.exchange(true);
  return !on->once || !again;
}

}  // namespace espalier::mutation
