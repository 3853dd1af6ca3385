// The memory budget of a process: every part of a run that may hold memory takes its share from this one value.
#pragma once

#include <cstdint>
#include <string>

namespace espalier {

struct Options;

struct Budget {
  std::int64_t bytes = 0;   // that the process may hold on its device in all; 0: not known
  bool given = false;       // by --memory-budget
  std::int64_t held = 0;    // not given: what the process held when the budget was made; `bytes` include it
  std::int64_t margin = 0;  // not given: this process's share of what stays free for others

  // The limit of everything that is held beside what was held already.
  std::int64_t beside_held() const { return bytes - held; }
  // "4.0 GiB", or "13.9 GiB: 0.2 GiB held, and 15.2 GiB free less a tenth".
  std::string text() const;
};

// --memory-budget, or bytes 0 if it is not given. Errors: OptionError.
Budget given_budget(const Options& options);

// Where none is given: what is held, and this process's share of what is free, less a tenth, which stays free.
Budget automatic_budget(std::int64_t held_bytes, std::int64_t free_bytes, std::int64_t sharing_processes);

}  // namespace espalier
