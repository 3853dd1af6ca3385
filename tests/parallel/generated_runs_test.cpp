// Whole training runs drawn from a seed: a model, rollouts, a loss, a plan, a critic or none, and two layouts. The run
// begins under the first, is cut after a drawn step and goes on under the second; it ends with the weights that one
// process has after all its steps. A failing seed is printed. ESPALIER_GENERATED_LAYOUTS=1000:500 takes other seeds.
#include <gtest/gtest.h>

#include "tests/parallel/draws.h"
#include "tests/parallel/rank_runs.h"

namespace espalier::testing {
namespace {

class GeneratedRuns : public RankRuns {
 protected:
  // Writes model and rollouts of the seed, and sets the options of its run.
  ModelShape draw(Draws& draws, std::uint64_t seed) {
    const std::string family = draws.one_of({"qwen2", "qwen3", "qwen3-odd", "qwen3-moe", "qwen3-moe-odd"});
    fs::remove_all(folder_ / "model");
    write_tiny_model(*tiny_model(family, DType::float32, seed), folder_ / "model");
    RolloutOptions rollouts;
    rollouts.groups = 3 + draws.below(4), rollouts.group_size = {1, 4};
    rollouts.shuffled = draws.one_in(3);
    rollouts.nested_prompt = rollouts.shared_start = draws.one_in(2) ? 0.4 : 0;
    rollouts.mask_gap = draws.one_in(2) ? 0.3 : 0;
    rollouts.policy = draws.one_in(2) ? PolicyAge::none : PolicyAge::near_old;
    write_jsonl(path("rollouts.jsonl"), make_rollouts(rollouts, seed));

    Options& o = options_;
    o.epochs = 2, o.mini_batch_size = 3 + draws.below(4);
    o.policy_loss = draws.one_of({"vanilla", "vanilla", "gspo", "cispo", "reinforce"});
    o.adv_estimator = draws.one_of({"grpo", "rloo", "reinforce_plus_plus_baseline"});
    o.entropy_coeff = 0.02;  // so that no gradient vanishes where all advantages do
    o.share = draws.one_of({"auto", "prompt", "off"});
    const std::vector<Plan> plans = all_plans({0, 2 + draws.below(9)});
    const Plan& plan = plans[static_cast<std::size_t>(draws.below(static_cast<std::int64_t>(plans.size())))];
    o.schedule = plan.schedule, o.token_budget = plan.budget, o.trunk_state = plan.trunk_state;
    o.wave_state = plan.wave_state;
    const ModelShape shape = tiny_shape(family);
    if (shape.experts > 0) o.router_aux_loss_coef = draws.one_in(2) ? 0.1 : 0;
    if (draws.one_in(3)) o.critic = o.model, o.adv_estimator = "gae";
    return shape;
  }

  // Before and behind the cut; a layout that cannot share the optimizer's state holds it whole.
  Options under(const Degrees& degrees, Draws& draws) const {
    Options out = options_;
    if (!degrees.full && degrees.ep <= degrees.tp && degrees.dp > 1 && draws.one_in(2)) out.shard = "optimizer";
    return out;
  }
};

TEST_F(GeneratedRuns, EndWithTheWeightsOfOneProcess) {
  const Options base = options_;
  for (const std::uint64_t seed : drawn_seeds(10)) {
    Draws draws(seed);
    options_ = base;
    const ModelShape shape = draw(draws, seed);
    const Degrees before = drawn_degrees(draws, shape), after = drawn_degrees(draws, shape);
    Options whole = options_, first = under(before, draws), second = under(after, draws);
    SCOPED_TRACE(text_of("seed ", seed, ": ", shape.architecture, ", ", text_of_degrees(before), ", then ",
                         text_of_degrees(after), whole.critic.empty() ? "" : ", critic"));
    whole.out = path("whole"), first.out = path("first"), second.out = path("second");
    const auto steps = static_cast<std::int64_t>(run(whole, {}).size());
    ASSERT_GE(steps, 2);
    first.steps = 1 + draws.below(steps - 1);
    run(first, before);
    second.resume = first.out;
    run(second, after);
    // As in expect_files_of_one_process: 1e-10 of a gradient moves a weight by 1e-10 of the learning rate.
    EXPECT_LE(distance("second/model.safetensors", "whole/model.safetensors"), kFloat64);
    if (!whole.critic.empty()) {
      EXPECT_LE(distance("second/critic/model.safetensors", "whole/critic/model.safetensors"), kFloat64);
    }
  }
}

}  // namespace
}  // namespace espalier::testing
