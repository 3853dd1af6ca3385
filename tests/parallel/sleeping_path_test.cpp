// A path whose layers are offloaded or sharded over cp (--path-state) where ranks shard rows, layers, heads or
// weights.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "espalier/mixers/attention/shape.h"
#include "espalier/model/open_path.h"
#include "espalier/program/joint_order.h"
#include "espalier/saved/sharded_path.h"
#include "tests/parallel/layouts.h"

namespace espalier::testing {
namespace {

// Trunks below trunks: what is above has gradients already when a trunk below is opened.
Case sleeping(const std::string& family, const Plan& plan, const std::string& state) {
  Case c = with(ragged(family), plan);
  c.rollouts.groups = 5, c.rollouts.shared_start = 0.7, c.rollouts.nested_prompt = 0.3;
  c.options.path_state = state;
  return c;
}

const std::vector<Plan> kPlans = {{"keep", "phased", 6, "keep"},
                                  {"offload", "phased", 6, "offload"},
                                  {"chains, recompute", "phased", 3, "recompute"}};

void expect_as_awake(const Case& c, const std::vector<Degrees>& layouts) {
  Case awake = c;
  awake.options.path_state = "keep";
  const Outcome one = run_case(awake);
  for (const Degrees& degrees : layouts) {
    SCOPED_TRACE(text_of(text_of_degrees(degrees), ", ", c.family, c.critic ? ", critic, path " : ", path ",
                         name_of(c.options.path_state)));
    expect_as_one_process(c, degrees, one);
    EXPECT_EQ(run_layout(c, degrees).ranks.front().report.plan.path.state(), c.options.path_state);
  }
}

TEST(SleepingPathOnRanks, GivesTheGradientOfOneProcessAwake) {
  for (const Plan& plan : kPlans)
    expect_as_awake(sleeping("qwen3", plan, "offload"), {{.cp = 2},
                                                         {.cp = 3},
                                                         {.pp = 2},
                                                         {.pp = 3},
                                                         {.cp = 2, .pp = 2},
                                                         {.tp = 2, .cp = 2},
                                                         {.pp = 2, .dp = 2},
                                                         {.dp = 2, .full = true},
                                                         {.cp = 2, .dp = 2, .full = true}});
}

TEST(SleepingPathOnRanks, WithExpertsToo) {
  for (const Plan& plan : kPlans)
    expect_as_awake(sleeping("qwen3-moe", plan, "offload"),
                    {{.cp = 2, .ep = 2}, {.pp = 2, .dp = 2, .ep = 2}, {.cp = 2, .pp = 2, .ep = 2}});
}

// Ranks without a wave of their own join the waves of the other ranks of their cp.
TEST(ShardedPath, GivesTheGradientOfOneProcess) {
  for (const Plan& plan : kPlans)
    expect_as_awake(sleeping("qwen3", plan, "divide"), {{.cp = 2},
                                                        {.cp = 3},
                                                        {.cp = 4},
                                                        {.tp = 2, .cp = 2},
                                                        {.cp = 2, .pp = 2},
                                                        {.cp = 2, .pp = 3},
                                                        {.cp = 2, .dp = 2},
                                                        {.cp = 2, .full = true},
                                                        {.cp = 2, .dp = 2, .full = true}});
}

TEST(ShardedPath, WithExpertsToo) {
  for (const Plan& plan : kPlans)
    expect_as_awake(sleeping("qwen3-moe", plan, "divide"), {{.cp = 2},
                                                            {.cp = 2, .ep = 2},
                                                            {.cp = 4, .ep = 2},
                                                            {.cp = 3, .dp = 2, .ep = 2},
                                                            {.cp = 2, .dp = 2, .ep = 4},
                                                            {.cp = 2, .pp = 2, .ep = 2},
                                                            {.cp = 2, .dp = 2, .ep = 2, .full = true}});
}

// A path of latents: whole on every rank of cp, sharded over these, and offloaded.
class LatentPathOnRanks : public ::testing::TestWithParam<const char*> {};

TEST_P(LatentPathOnRanks, GivesTheGradientOfOneProcess) {
  for (const Plan& plan : kPlans) {
    expect_as_awake(sleeping("DeepseekV2", plan, GetParam()), {{.cp = 2},
                                                               {.cp = 3},
                                                               {.tp = 2, .cp = 2},
                                                               {.cp = 2, .pp = 2},
                                                               {.cp = 2, .dp = 2},
                                                               {.cp = 2, .dp = 2, .full = true}});
    expect_as_awake(sleeping("DeepseekV3", plan, GetParam()),
                    {{.cp = 4}, {.cp = 2, .ep = 2}, {.cp = 2, .dp = 2, .ep = 4}, {.cp = 2, .pp = 2, .ep = 2}});
  }
}

TEST_P(LatentPathOnRanks, OfACriticOfLossesOfWholeRolloutsAndOfAdapters) {
  expect_as_awake(as_critic(sleeping("DeepseekV3", kPlans[0], GetParam())), {{.cp = 3}, {.cp = 2, .pp = 2}});
  Case c = sleeping("DeepseekV2", kPlans[2], GetParam());
  c.options.policy_loss = "gspo", c.options.entropy_coeff = 0.1;
  expect_as_awake(c, {{.cp = 3}, {.cp = 2, .dp = 2, .full = true}});
  c = sleeping("DeepseekV2", kPlans[2], GetParam());
  c.options.lora_rank = 3, c.options.lora_alpha = 7, c.options.lora_target = "all-linear";
  expect_as_awake(c, {{.cp = 2}, {.tp = 2, .cp = 2}});
  c = sleeping("DeepseekV2", kPlans[0], GetParam());
  c.options.train = "norms";
  expect_as_awake(c, {{.cp = 2}});
}
INSTANTIATE_TEST_SUITE_P(States, LatentPathOnRanks, ::testing::Values("latents", "latents-divide", "latents-offload"),
                         [](const auto& info) { return name_of_family(info.param); });

TEST(ShardedPath, OfACriticAndOfLossesOfWholeRollouts) {
  expect_as_awake(as_critic(sleeping("qwen3", kPlans[0], "divide")), {{.cp = 3}, {.cp = 2, .pp = 2}});
  Case c = sleeping("qwen3", kPlans[2], "divide");
  c.options.policy_loss = "gspo", c.options.entropy_coeff = 0.1;
  expect_as_awake(c, {{.cp = 3}, {.cp = 2, .pp = 2}, {.cp = 2, .dp = 2, .full = true}});
}

TEST(ShardedPath, ARankWithFewerWavesJoinsThoseOfOthers) {
  const Case c = eleven_waves();
  expect_as_awake(c, {{.cp = 12}});
  const StepPlan plan = run_layout(c, {.cp = 12}).ranks.front().report.plan;
  EXPECT_GT(events_of(plan.items, 0).size(), events_of(plan.items, 11).size());
}

constexpr std::int64_t kLayers = 4, kOuter = 11, kInner = 5;

// Whole numbers, so that sums are exact in any order.
at::Tensor numbers(std::int64_t rows, std::int64_t salt) {
  return (at::arange(rows * 8, at::kDouble) * (salt % 7 + 1)).remainder(31).view({rows, 1, 8});
}

// A rank's sharded path beside one that holds what all ranks add: two trunks, one inside the other, and waves.
class BothPaths {
 public:
  BothPaths(const ModelShape& shape, std::int64_t layers_awake, Group& cp)
      : cp_(cp),
        keeper_({shape, element_bytes(DType::float64), false}, kOuter + kInner, true, false, at::kDouble, cp, arena_),
        sharded_(shape, kOuter + kInner, at::kDouble, true, arena_, &keeper_, layers_awake),
        whole_(shape, kOuter + kInner, at::kDouble, true, other_) {}

  void open(std::int64_t rows) {
    for (OpenPath* path : {&sharded_, &whole_}) path->push(rows, 0);
    for (std::int64_t layer = 0; layer < kLayers; ++layer) {
      begin_forward(layer);
      for (OpenPath* path : {&sharded_, &whole_}) {
        path->top(layer).k.copy_(numbers(rows, layer));
        path->top(layer).v.copy_(numbers(rows, layer + 3));
      }
      expect_keys_and_values(layer);
    }
  }
  void wave() {
    ++waves_;
    for (std::int64_t layer = 0; layer < kLayers; ++layer) begin_forward(layer), expect_keys_and_values(layer);
    backward(sharded_.rows());
  }
  void close(std::int64_t rows_above) {
    backward(rows_above);
    for (OpenPath* path : {&sharded_, &whole_}) path->pop();
  }

 private:
  void begin_forward(std::int64_t layer) {
    for (OpenPath* path : {&sharded_, &whole_}) path->begin_forward(layer);
  }
  void backward(std::int64_t rows_above) {
    for (std::int64_t layer = kLayers - 1; layer >= 0; --layer) {
      for (OpenPath* path : {&sharded_, &whole_}) path->begin_backward(layer, rows_above);
      expect_keys_and_values(layer);
      const OpenPath::Layer all = sharded_.path(layer, sharded_.rows()), expected = whole_.path(layer, whole_.rows());
      const at::Tensor keys = all.grad_k.clone(), values = all.grad_v.clone();
      cp_.add_over_ranks(keys);
      cp_.add_over_ranks(values);
      EXPECT_TRUE(keys.equal(expected.grad_k)) << "layer " << layer << ", wave " << waves_;
      EXPECT_TRUE(values.equal(expected.grad_v)) << "layer " << layer << ", wave " << waves_;
      for (int rank = 0; rank < cp_.size(); ++rank) add(whole_.path(layer, rows_above), layer, rank);
      add(sharded_.path(layer, rows_above), layer, cp_.rank());
    }
    for (OpenPath* path : {&sharded_, &whole_}) path->end_backward(0);
  }
  void add(const OpenPath::Layer& above, std::int64_t layer, int rank) const {
    above.grad_k.add_(numbers(above.grad_k.size(0), waves_ + layer + rank));
    above.grad_v.add_(numbers(above.grad_v.size(0), waves_ + layer - rank + 5));
  }
  void expect_keys_and_values(std::int64_t layer) const {
    const OpenPath::Layer found = sharded_.path(layer, sharded_.rows()), expected = whole_.path(layer, whole_.rows());
    EXPECT_TRUE(found.k.equal(expected.k) && found.v.equal(expected.v)) << "layer " << layer << ", wave " << waves_;
  }

  Group& cp_;
  Arena arena_{1 << 20}, other_{1 << 20};
  ShardedPath keeper_;
  OpenPath sharded_, whole_;
  std::int64_t waves_ = 0;
};

// None or two of four layers are whole on every rank; a path of more rows than ranks, and of fewer.
TEST(ShardedPath, HoldsWhatAllRanksAdd) {
  ModelShape shape;
  shape.hidden = 16, shape.layer = attention_layers(kLayers, {.heads = 2, .kv_heads = 1, .head_dim = 8}, 0);
  for (const std::int64_t layers_awake : {0, 2, 3})
    for (const std::int64_t cp : {2, 3, 12}) {
      SCOPED_TRACE(text_of(layers_awake, " layers whole, cp ", cp));
      run_ranks({.cp = cp}, [&](const Mesh& mesh) {
        BothPaths paths(shape, layers_awake, mesh.cp);
        paths.open(kOuter), paths.wave();
        paths.open(kInner), paths.wave(), paths.wave(), paths.close(kOuter);
        paths.open(kInner - 2), paths.wave(), paths.close(kOuter);
        paths.wave(), paths.close(0);
        paths.open(1), paths.wave(), paths.close(0);
      });
    }
}

}  // namespace
}  // namespace espalier::testing
