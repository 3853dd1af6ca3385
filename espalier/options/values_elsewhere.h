// Values of options as other trainers and libraries spell them, and words that lead to another option.
#pragma once

#include <string>

#include "espalier/options/options.h"

namespace espalier {

// The row's own word where `value` is another spelling of it (bf16 of --dtype: bfloat16), else `value` itself.
std::string own_word(const OptionRow& row, const std::string& value);

// Where a word that the row does not take leads ("--policy-loss ppo": to vanilla), as a sentence; "" where not known.
std::string remedy_elsewhere(const OptionRow& row, const std::string& value);

}  // namespace espalier
