// What --help prints.
#pragma once

#include <string>

#include "cli/verbs.h"

namespace espalier::cli {

std::string program_usage();
std::string verb_usage(const Verb& verb);

}  // namespace espalier::cli
