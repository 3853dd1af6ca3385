// A step's profile (--profile) for a person.
#pragma once

#include <ostream>

#include "espalier/measure/step_profile.h"

namespace espalier::cli {

void print_profile(std::ostream& out, const StepProfile& profile);

}  // namespace espalier::cli
