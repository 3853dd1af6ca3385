#include "espalier/parallel/sum_order.h"

#include <set>

#include "espalier/base/error.h"

namespace espalier {
namespace {

// Documented variables of NCCL that choose algorithm, protocol and transport, or how a sum is cut into pieces.
// Others (NCCL_DEBUG, time limits, names of interfaces) leave the order of sums as it is.
constexpr const char* kVariables[] = {
    "NCCL_ALGO",           "NCCL_PROTO",        "NCCL_NVLS_ENABLE",      "NCCL_NVLS_CHUNKSIZE",
    "NCCL_COLLNET_ENABLE", "NCCL_MNNVL_ENABLE", "NCCL_MIN_NCHANNELS",    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NRINGS",     "NCCL_MAX_NRINGS",   "NCCL_MIN_CTAS",         "NCCL_MAX_CTAS",
    "NCCL_NTHREADS",       "NCCL_BUFFSIZE",     "NCCL_LL_BUFFSIZE",      "NCCL_LL128_BUFFSIZE",
    "NCCL_P2P_DISABLE",    "NCCL_P2P_LEVEL",    "NCCL_SHM_DISABLE",      "NCCL_NET",
    "NCCL_IB_DISABLE",     "NCCL_CROSS_NIC",    "NCCL_TOPO_FILE",        "NCCL_GRAPH_FILE",
    "NCCL_CONF_FILE",      "NCCL_TUNER_PLUGIN", "NCCL_TUNER_CONFIG_FILE"};

std::string text_of_setting(const SumOrder& order, const std::string& name) {
  const auto found = order.find(name);
  return found == order.end() ? "not set" : found->second;
}

}  // namespace

SumOrder sum_order_of(const std::function<const char*(const char* name)>& environment) {
  SumOrder out;
  for (const char* const name : kVariables)
    if (const char* const value = environment(name); value != nullptr && *value != '\0') out[name] = value;
  return out;
}

std::string difference(const SumOrder& before, const SumOrder& now) {
  std::set<std::string> names;
  for (const SumOrder* const order : {&before, &now})
    for (const auto& [name, value] : *order) names.insert(name);
  std::string out;
  for (const std::string& name : names) {
    const std::string was = text_of_setting(before, name), is = text_of_setting(now, name);
    if (was != is) out += text_of(out.empty() ? "" : ", ", name, " (", was, " before, ", is, " now)");
  }
  return out;
}

}  // namespace espalier
