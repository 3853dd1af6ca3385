#include "espalier/doctor/finding.h"

#include <array>
#include <cstddef>

namespace espalier {
namespace {

struct Row {
  const char *name, *report, *remedy;
};
constexpr Row kRows[] = {
#define ESPALIER_FAULT(name, report, remedy) {#name, report, remedy},
#include "espalier/doctor/known_faults.def"
#undef ESPALIER_FAULT
};

const Row& row_of(Fault fault) { return kRows[static_cast<std::size_t>(fault)]; }

}  // namespace

const char* name_of(Sure sure) {
  constexpr std::array<const char*, 3> kNames = {"certain", "likely", "possible"};
  return kNames[static_cast<std::size_t>(sure)];
}

const char* name_of(Fault fault) { return row_of(fault).name; }
const char* report_of(Fault fault) { return row_of(fault).report; }
const char* remedy_of(Fault fault) { return row_of(fault).remedy; }

}  // namespace espalier
