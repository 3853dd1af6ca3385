// One layout of every axis with the plans that differ most: on a device of each rank's own where one is bound
// (ESPALIER_TEST_DEVICE), else on processors.
#include <gtest/gtest.h>

#include "tests/parallel/layouts.h"

namespace espalier::testing {
namespace {

struct Layout {
  const char* name;
  const char* family;
  Degrees degrees;
  const char* path_state = "auto";
};

class Axes : public ::testing::TestWithParam<Layout> {};

TEST_P(Axes, GivesTheGradientOfOneProcess) {
  for (const Plan& plan : {Plan{"phased", "phased", 7, "keep"}, Plan{"packed", "packed", 0, "keep"}}) {
    SCOPED_TRACE(plan.name);
    Case planned = with(ragged(GetParam().family), plan);
    planned.options.path_state = GetParam().path_state;
    expect_as_one_process(planned, GetParam().degrees, run_case(planned));
  }
}

INSTANTIATE_TEST_SUITE_P(One, Axes,
                         ::testing::Values(Layout{"tp", "qwen3-moe", {.tp = 2}}, Layout{"cp", "qwen3", {.cp = 2}},
                                           Layout{"path", "qwen3", {.cp = 2}, "divide"},
                                           Layout{"pp", "qwen3", {.pp = 2}}, Layout{"dp", "llama", {.dp = 2}},
                                           Layout{"ep", "qwen3-moe", {.dp = 2, .ep = 2}},
                                           Layout{"full", "qwen3-moe", {.dp = 2, .full = true}}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace espalier::testing
