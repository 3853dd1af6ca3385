// Where saved activations wait makes no difference to the last bit: kept, recomputed or stored away, of trunks and of
// waves; nor where the path waits.
#include <gtest/gtest.h>

#include "espalier/base/error.h"
#include "tests/equivalence/fixture.h"

namespace espalier::testing {
namespace {

Case drawn_for_states(std::uint64_t seed) {
  Case c;
  c.seed = seed;
  c.rollouts = ragged_rollouts();
  c.rollouts.rewards = true, c.rollouts.token_advantages = false;
  const char* families[] = {"qwen3",      "llama-windows",   "llama-bias", "qwen2", "qwen3-moe", "qwen3-moe-late",
                            "qwen3-next", "qwen3-next-last", "DeepseekV3", "Bamba", "NemotronH", "Lfm2"};
  c.family = families[seed % std::size(families)];
  c.options.schedule = "phased";
  c.options.token_budget = static_cast<std::int64_t>(seed % 5 == 0 ? 0 : 3 + seed % 13);
  if (seed % 3 == 0) c.options.policy_loss = "gspo";
  if (c.family == "qwen3-moe" && seed % 2 == 0) c.options.router_aux_loss_coef = 0.1;
  return c;
}

TEST(States, GiveTheBitsOfKeptState) {
  std::int64_t stored = 0, path_stored = 0;
  for (std::uint64_t seed = 1; seed <= 24; ++seed) {
    Case c = drawn_for_states(seed);
    c.options.trunk_state = "keep", c.options.wave_state = "keep";
    const Outcome kept = run_case(c);
    const auto expect_the_same = [&](const char* trunks, const char* waves, const char* path) {
      SCOPED_TRACE(text_of("seed ", seed, ", ", c.family, ", trunks ", trunks, ", waves ", waves, ", path ", path));
      c.options.trunk_state = trunks, c.options.wave_state = waves, c.options.path_state = path;
      const Outcome other = run_case(c);
      EXPECT_TRUE(at::equal(other.gradient, kept.gradient));
      EXPECT_EQ(other.loss, kept.loss);
      stored += other.report.plan.chosen.stored_bytes > 0;
      path_stored += other.report.plan.chosen.path_stored_bytes > 0;
    };
    for (const char* trunks : {"keep", "recompute", "offload"})
      for (const char* waves : {"keep", "recompute"}) expect_the_same(trunks, waves, "keep");
    expect_the_same("offload", "recompute", "offload");
  }
  EXPECT_GT(stored, 36);       // of 72: most of the cases have a trunk
  EXPECT_GT(path_stored, 12);  // of 24
}

}  // namespace
}  // namespace espalier::testing
