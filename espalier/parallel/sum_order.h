// The settings of NCCL that decide in which order ranks sum: algorithm, protocol, and the numbers of channels and
// threads that cut a sum into pieces. Runs that differ in them differ in the last bits of gradients.
//
// The settings are texts of the environment. A checkpoint has the settings of its run, and a continued run compares
// them.
#pragma once

#include <functional>
#include <map>
#include <string>

namespace espalier {

// NCCL's variables that the environment sets, and their values.
using SumOrder = std::map<std::string, std::string>;
SumOrder sum_order_of(const std::function<const char*(const char* name)>& environment);

// "NCCL_ALGO (Ring before, not set now), NCCL_PROTO (LL before, Simple now)"; empty where nothing differs.
std::string difference(const SumOrder& before, const SumOrder& now);

}  // namespace espalier
