// The texts of --help.
#pragma once

#include <string>

#include "cli/verbs.h"

namespace espalier::cli {

std::string program_usage();

// The most used options of a verb, at most 30 lines.
std::string verb_usage(const Verb& verb);
std::string full_verb_usage(const Verb& verb);

// The options of a verb, or with null of all, that have to do with `word`. Errors: OptionError where none has.
std::string usage_of_word(const Verb* verb, const std::string& word);

}  // namespace espalier::cli
