// Settings of NCCL that change the order of sums.
#include "espalier/parallel/sum_order.h"

#include <gtest/gtest.h>

namespace espalier {
namespace {

SumOrder of(const SumOrder& environment) {
  return sum_order_of([&](const char* name) -> const char* {
    const auto found = environment.find(name);
    return found == environment.end() ? nullptr : found->second.c_str();
  });
}

TEST(SumOrder, HasTheVariablesThatChooseAlgorithmsProtocolsAndChannels) {
  const SumOrder chosen{
      {"NCCL_ALGO", "Ring"}, {"NCCL_PROTO", "LL128"}, {"NCCL_NVLS_ENABLE", "0"}, {"NCCL_MAX_NCHANNELS", "4"}};
  SumOrder all = chosen;
  all["NCCL_DEBUG"] = "INFO", all["NCCL_SOCKET_IFNAME"] = "eth0", all["NCCL_BUFFSIZE"] = "", all["PATH"] = "/bin";
  EXPECT_EQ(of(all), chosen);
  EXPECT_TRUE(of({}).empty());
}

TEST(SumOrder, DifferencesAreNamedWithBothValues) {
  const SumOrder before{{"NCCL_ALGO", "Ring"}, {"NCCL_PROTO", "LL"}, {"NCCL_BUFFSIZE", "1048576"}};
  EXPECT_EQ(difference(before, before), "");
  EXPECT_EQ(difference(before, {{"NCCL_PROTO", "Simple"}, {"NCCL_BUFFSIZE", "1048576"}, {"NCCL_TOPO_FILE", "t.xml"}}),
            "NCCL_ALGO (Ring before, not set now), NCCL_PROTO (LL before, Simple now), NCCL_TOPO_FILE (not set before, "
            "t.xml now)");
}

}  // namespace
}  // namespace espalier
