// A finding of `doctor`: a known fault, and the rows of the dump that prove it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace espalier {

// certain: the fault alone explains the rows; likely: nothing known explains them as well; possible: other causes do.
enum class Sure { certain, likely, possible };
const char* name_of(Sure sure);

// Rows of known_faults.def.
enum class Fault {
#define ESPALIER_FAULT(name, report, remedy) name,
#include "espalier/doctor/known_faults.def"
#undef ESPALIER_FAULT
};
const char* name_of(Fault fault);
const char* report_of(Fault fault);  // an address
const char* remedy_of(Fault fault);

struct Finding {
  Fault fault;
  Sure sure = Sure::certain;
  std::vector<std::int64_t> rows;  // indices of rollouts, ascending
  std::string text;                // numbers of these rows
};

}  // namespace espalier
