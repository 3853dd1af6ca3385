// One layout of every axis with the plans that differ most: on a device of each rank's own where one is bound
// (ESPALIER_TEST_DEVICE), else on processors.
#include <gtest/gtest.h>

#include "espalier/base/error.h"
#include "espalier/shape/local_shape.h"
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
                                           Layout{"latents_tp", "DeepseekV3", {.tp = 2}, "latents"},
                                           Layout{"latents_pp", "DeepseekV2", {.pp = 2}, "latents"},
                                           Layout{"latents_full", "DeepseekV3", {.dp = 2, .full = true}, "latents"},
                                           Layout{"latents_cp", "DeepseekV3", {.cp = 2}, "latents"},
                                           Layout{"latents_path", "DeepseekV3", {.cp = 2}, "latents-divide"},
                                           Layout{"pp", "qwen3", {.pp = 2}}, Layout{"dp", "llama", {.dp = 2}},
                                           Layout{"ep", "qwen3-moe", {.dp = 2, .ep = 2}},
                                           Layout{"full", "qwen3-moe", {.dp = 2, .full = true}}),
                         [](const auto& info) { return std::string(info.param.name); });

// Every family of the table: the gradient of one process, or refused by name before anything runs.
class FamilyAxes : public ::testing::TestWithParam<std::string> {};

TEST_P(FamilyAxes, GiveTheGradientOfOneProcessOrAreRefused) {
  std::int64_t ran = 0;
  const Case c = ragged(GetParam());
  for (const Plan& plan : {Plan{"phased", "phased", 7, "keep"}, Plan{"packed", "packed", 0, "keep"}}) {
    const Case planned = with(c, plan);
    const Outcome one = run_case(planned);
    for (const Degrees& degrees :
         {Degrees{.tp = 2}, Degrees{.cp = 2}, Degrees{.pp = 3}, Degrees{.dp = 2}, Degrees{.dp = 2, .full = true},
          Degrees{.dp = 2, .ep = 2}, Degrees{.tp = 2, .ep = 2}, Degrees{.tp = 2, .pp = 2, .dp = 2}}) {
      SCOPED_TRACE(text_of(text_of_degrees(degrees), ", ", plan.name));
      if (degrees.ep > 1 && shape_of(c).experts == 0) continue;
      try {
        const LocalShape checked(shape_of(c), degrees, {});
      } catch (const OptionError&) {
        continue;
      }
      expect_as_one_process(planned, degrees, one);
      ++ran;
    }
  }
  EXPECT_GE(ran, 6) << "pp, dp and divided weights serve every family";
}
INSTANTIATE_TEST_SUITE_P(Table, FamilyAxes, ::testing::ValuesIn(families_of_table()),
                         [](const auto& info) { return name_of_family(info.param); });

}  // namespace
}  // namespace espalier::testing
