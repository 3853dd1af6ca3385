// A step's profile (--profile) for a person and for a program.
#pragma once

#include <ostream>

#include "espalier/base/json.h"
#include "espalier/train/step_profile.h"

namespace espalier::cli {

Json profile_json(const StepProfile& profile);
void print_profile(std::ostream& out, const StepProfile& profile);

}  // namespace espalier::cli
