// The deliberate faults, and the switch that turns one of them on.
#pragma once

#include <string>
#include <vector>

namespace espalier::testing {

struct Fault {
  std::string name;  // as in ESPALIER_MUTATION(name)
  std::string meaning;
  bool seen_by_verify = true;      // it makes the shared step differ from the dense one, so `verify` must fail too
  bool once = false;               // only the first time in each check that the engine comes to its line
  std::string together_with = {};  // a second fault that is on at the same time: what would have hidden the first
};

const std::vector<Fault>& all_faults();

// Faults are on while one of these lives.
class SwitchedOn {
 public:
  explicit SwitchedOn(const Fault& fault);
  ~SwitchedOn();
  SwitchedOn(const SwitchedOn&) = delete;
  SwitchedOn& operator=(const SwitchedOn&) = delete;

  void begin_check();  // `once` counts from here
  int times() const;   // how often the engine has come to the fault's line
};

}  // namespace espalier::testing
