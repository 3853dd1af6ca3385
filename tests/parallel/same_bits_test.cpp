// Where sums have a defined order, every layout without tp gives the log-probs of one process to the last bit.
#include <gtest/gtest.h>

#include "tests/parallel/layouts.h"
#include "tests/with_products.h"

namespace espalier::testing {
namespace {

struct Layout {
  const char* name;
  const char* family;
  Degrees degrees;
  const char* path_state = "auto";
};

class SameBitsOfRanks : public ::testing::TestWithParam<Layout> {
 private:
  const WithProducts own_{true};
};

TEST_P(SameBitsOfRanks, AreThoseOfOneProcess) {
  for (const DType dtype : {DType::float32, DType::bfloat16})
    for (const Plan& plan : {Plan{"phased", "phased", 7, "keep"}, Plan{"packed", "packed", 0, "keep"},
                             Plan{"dense", "dense", 20, "auto"}}) {
      SCOPED_TRACE(plan.name + ", " + name_of(dtype));
      Case c = with(ragged(GetParam().family), plan);
      c.rollouts.policy = PolicyAge::none;
      c.options.path_state = GetParam().path_state;
      const Outcome one = run_case(c, dtype);
      std::vector<Outcome> ranks(static_cast<std::size_t>(GetParam().degrees.ranks()));
      run_ranks(GetParam().degrees, [&](const Mesh& mesh) {
        ranks[static_cast<std::size_t>(mesh.world.rank())] = run_case(c, dtype, mesh);
      });
      for (const Outcome& rank : ranks) expect_same_bits(rank, one);
    }
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, SameBitsOfRanks,
    ::testing::Values(Layout{"dp", "qwen3", {.dp = 2}}, Layout{"full", "llama", {.dp = 2, .full = true}},
                      Layout{"cp", "qwen3", {.cp = 2}}, Layout{"path", "qwen3", {.cp = 2}, "divide"},
                      Layout{"cp_window", "qwen3-window", {.cp = 3}}, Layout{"pp", "llama", {.pp = 2}},
                      Layout{"ep", "qwen3-moe", {.dp = 2, .ep = 2}},
                      Layout{"all", "qwen3-moe", {.cp = 2, .pp = 2, .dp = 2}}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace espalier::testing
