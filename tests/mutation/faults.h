// The deliberate faults, and the switch that turns one of them on. The table is tests/mutation/faults.py.
#pragma once

#include <string>
#include <vector>

namespace espalier::testing {

// A row of the table; its members are described there.
struct Fault {
  std::string name;
  std::string meaning;
  bool seen_by_verify;
  bool once;
  std::string together_with;
  bool alone;
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
