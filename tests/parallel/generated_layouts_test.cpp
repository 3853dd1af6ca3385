// Layouts, models, rollouts, losses and plans drawn from a seed: the gradient of one process. A failing seed is
// printed. ESPALIER_GENERATED_LAYOUTS=1000:500 takes the 500 seeds from 1000 on in place of the test's own.
#include <gtest/gtest.h>

#include <algorithm>

#include "espalier/data/training_data.h"
#include "espalier/forecast/communication.h"
#include "espalier/plan/rank_layout.h"
#include "espalier/program/row_shares.h"
#include "espalier/shape/path_leaves.h"
#include "tests/parallel/draws.h"
#include "tests/parallel/layouts.h"

namespace espalier::testing {
namespace {

std::vector<std::string> drawn_families() {
  std::vector<std::string> out{
      "llama",         "llama-bias",       "qwen2",          "qwen3",         "qwen3-odd",      "qwen3-pad",
      "qwen3-moe",     "qwen3-moe-sparse", "qwen3-moe-late", "qwen3-moe-odd", "qwen3-moe-ties", "qwen3-window",
      "llama-windows", "Gemma2",           "Olmo2",          "gemma4-moe",    "gemma4-reads"};
  for (const std::string& family : families_of_table())
    if (const ModelShape shape = tiny_shape(family); narrows_path(shape) || shape.states() > 0) out.push_back(family);
  return out;
}

Case drawn_case(Draws& draws, std::uint64_t seed) {
  static const std::vector<std::string> families = drawn_families();
  Case c;
  c.seed = seed;
  c.family = families[static_cast<std::size_t>(draws.below(std::ssize(families)))];
  c.rollouts = any_options(seed, 12);
  c.rollouts.vocabulary = 50, c.rollouts.rewards = true;
  Options& options = c.options;
  options.policy_loss = draws.one_of({"vanilla", "vanilla", "gspo", "cispo", "sapo", "vespo", "gpg", "reinforce"});
  options.loss_agg_mode = options.policy_loss == "sapo" ? "" : draws.one_of({"", "token-mean", "seq-mean-token-sum"});
  options.adv_estimator = draws.one_of({"grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"});
  options.share = draws.one_of({"auto", "auto", "prompt", "off"});
  if (options.policy_loss == "vanilla") options.ratio_level = draws.one_of({"token", "sequence"});
  options.entropy_coeff = 0.02;  // so that no gradient vanishes where all advantages do
  if (c.rollouts.policy != PolicyAge::none) {
    options.kl_loss_coef = draws.one_of({0.0, 0.05}), options.kl_loss_type = draws.one_of({"k1", "k3", "k3_unbiased"});
    options.rollout_is = draws.one_of({"none", "token", "sequence"});
    if (draws.one_in(3)) options.off_policy_threshold = 0.3;
  }
  if (shape_of(c).experts > 0 && !shape_of(c).router.sigmoid && draws.one_in(3)) {
    options.router_aux_loss_coef = 0.5, options.router_z_loss_coef = 0.1;
    options.router_aux_loss_scope = draws.one_of({"rollout", "minibatch"});
  }
  const std::vector<Plan> plans = all_plans({0, 1 + draws.below(13)});
  c = with(c, plans[static_cast<std::size_t>(draws.below(static_cast<std::int64_t>(plans.size())))]);
  options.path_state = draws.one_of({"auto", "keep", "offload", "divide"});
  if (narrows_path(shape_of(c)) && draws.one_in(2))
    options.path_state = draws.one_of({"latents", "latents-offload", "latents-divide"});
  return draws.one_in(5) ? as_critic(c) : c;
}

void expect_as_dense(const Case& c) {
  const Worst worst = worst_parameter(c, run_case(c).gradient, run_case(with(c, {"", "dense", 0, "auto"})).gradient);
  EXPECT_LE(worst.error, kFloat64) << worst.parameter << ", against dense";
}

bool divides_a_wave(const std::vector<PlanItem>& items, std::int64_t cp) {
  return std::ranges::any_of(items, [cp](const PlanItem& item) {
    return item.kind == ItemKind::wave ? is_sharded(item, cp) : divides_a_wave(item.below, cp);
  });
}

std::string text_of_bytes(const TrafficBytes& bytes) {
  const auto axes = [](const AxisBytes& of) {
    return text_of("tp ", of.tp, " cp ", of.cp, " pp ", of.pp, " dp ", of.dp, " ep ", of.ep, "; ");
  };
  return "a " + axes(bytes.a) + "b " + axes(bytes.b) + "c " + axes(bytes.c) + "reduction " + axes(bytes.reduction);
}

// Every rank sends others the bytes of the plan, and none takes more from its arena than the one with most.
void expect_planned(const Case& c, const Degrees& degrees) {
  const TrainingData data(make_rollouts(c.rollouts, c.seed), c.options, c.critic);
  const auto batch = data.mini_batch(0).rollouts;
  PlanOptions options;
  options.dtype = DType::float64, options.kind = step_kind_of(c.options, shape_of(c), batch);
  options.setting.held.optimizer = false;
  constexpr int kThreads = 2;
  const MachineProfile machine = default_profile("cpu", options.dtype, kThreads);
  const std::vector<Outcome> ranks = run_layout(c, degrees).ranks;
  std::vector<const StepPlan*> plans(static_cast<std::size_t>(degrees.dp));
  for (std::int64_t rank = 0; rank < degrees.ranks(); ++rank)
    plans[static_cast<std::size_t>(place_of(rank, degrees).dp)] = &ranks[static_cast<std::size_t>(rank)].report.plan;
  for (std::int64_t rank = 0; rank < degrees.ranks(); ++rank) {
    const LocalShape local(shape_of(c), degrees, place_of(rank, degrees));
    const TrafficBytes planned = Communication(local, options.dtype, options.kind, machine).of(plans, batch).bytes;
    EXPECT_EQ(text_of_bytes(ranks[static_cast<std::size_t>(rank)].report.bytes), text_of_bytes(planned))
        << "bytes of rank " << rank;
  }
  PhasePeaks most;
  for (std::int64_t dp = 0; dp < degrees.dp; ++dp) {
    const StepPlan& plan = *plans[static_cast<std::size_t>(dp)];
    // A share of a wave of few rows may take more than the wave would whole: it has all its keys besides.
    if (divides_a_wave(plan.items, degrees.cp)) return;
    const LocalShape local(shape_of(c), degrees, {.dp = dp});
    for (const RankCost& stage : forecast(plans, dp, batch, local, options, machine).stages) {
      const ActivationBytes bytes(LocalShape(shape_of(c), degrees, {.pp = stage.pp, .dp = dp}), options.dtype,
                                  options.kind, options.setting);
      const std::int64_t beside = bytes.constant() + bytes.scratch(plan.max_rows, plan.max_path_rows, kThreads) +
                                  bytes.in_flight(stage.cost.stored_bytes) +
                                  bytes.in_flight(stage.cost.path_stored_bytes);
      for (auto phase : {&PhasePeaks::a, &PhasePeaks::b, &PhasePeaks::c})
        if (stage.cost.bytes.*phase > 0) most.*phase = std::max(most.*phase, stage.cost.bytes.*phase - beside);
    }
  }
  // Over all phases: where a rank takes part in a trunk of others, its own waves are held in the phase of trunks, too.
  EXPECT_LE(ranks.front().report.arena_bytes.peak(), most.peak());
}

TEST(GeneratedLayouts, GiveTheGradientOfOneProcess) {
  for (const std::uint64_t seed : drawn_seeds(40)) {
    Draws draws(seed);
    Case c = drawn_case(draws, seed);
    const Degrees degrees = drawn_degrees(draws, shape_of(c));
    SCOPED_TRACE(text_of("seed ", seed, ": ", text_of_degrees(degrees), ", ", c.family, c.critic ? ", critic, " : ", ",
                         name_of(c.options.policy_loss)));
    EXPECT_NO_THROW(expect_as_one_process(c, degrees, run_case(c)));
    EXPECT_NO_THROW(expect_as_dense(c));
    if (degrees.ep > 1) continue;  // what comes to a rank's experts is known when it comes
    EXPECT_NO_THROW(expect_planned(c, degrees));
  }
}

}  // namespace
}  // namespace espalier::testing
