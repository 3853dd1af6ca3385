// Spellings of option values in other trainers and libraries, and words that belong to another option.
#pragma once

#include <string>

#include "espalier/options/options.h"

namespace espalier {

// The row's own word where `value` is another spelling of it (bf16 of --dtype: bfloat16), else `value` itself.
std::string own_word(const OptionRow& row, const std::string& value);

// A remedy for a word that the row does not take ("--policy-loss ppo": use vanilla), as a sentence; "" if unknown.
std::string remedy_elsewhere(const OptionRow& row, const std::string& value);

}  // namespace espalier
