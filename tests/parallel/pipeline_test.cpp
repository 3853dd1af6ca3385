// Layers divided over stages: the gradient of one process, and the time that stages wait for each other.
#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "espalier/data/training_data.h"
#include "espalier/forecast/pipeline_time.h"
#include "espalier/ops/operations.h"
#include "espalier/plan/rank_layout.h"
#include "tests/parallel/layouts.h"
#include "tests/support/layers.h"

namespace espalier::testing {
namespace {

class Pipeline : public ::testing::TestWithParam<const char*> {};

// Three layers. Embeddings are tied in llama-bias and qwen3: its first and last stage both have a gradient of them.
TEST_P(Pipeline, EveryPlanGivesTheGradientOfOneProcess) {
  expect_all_plans(ragged(GetParam()), {0, 7}, {{.pp = 2}, {.pp = 3}});
}
TEST_P(Pipeline, ACriticToo) { expect_all_plans(as_critic(ragged(GetParam())), {7}, {{.pp = 2}}); }
INSTANTIATE_TEST_SUITE_P(Models, Pipeline,
                         ::testing::Values("llama", "llama-bias", "qwen2", "qwen3-pad", "qwen3", "qwen3-window",
                                           "qwen3-window-sinks", "qwen3-moe", "qwen3-moe-sparse", "qwen3-moe-late",
                                           "DeepseekV2", "DeepseekV3", "qwen3-next", "qwen3-next-last", "Bamba",
                                           "GraniteMoeHybrid", "NemotronH", "Lfm2", "Gemma4"),
                         [](const auto& info) { return name_of_family(info.param); });

TEST(PipelineLosses, OfWholeRolloutsAndOfRouters) {
  Case c = ragged("qwen3");
  c.options.policy_loss = "gspo", c.options.entropy_coeff = 0.02;
  expect_all_plans(c, {0, 5}, {{.pp = 2}});
  for (const char* scope : {"rollout", "minibatch"}) {
    Case routers = ragged("qwen3-moe-late");
    routers.options.router_aux_loss_coef = 0.5, routers.options.router_z_loss_coef = 0.1;
    routers.options.router_aux_loss_scope = scope;
    expect_all_plans(routers, {0, 7}, {{.pp = 3}});
    const Outcome one = run_case(routers);
    for (const Outcome& rank : run_layout(routers, {.pp = 3}).ranks) {
      EXPECT_EQ(rank.report.router.load, one.report.router.load);
      EXPECT_NEAR(rank.report.router.aux_loss, one.report.router.aux_loss, kFloat64);
    }
  }
}

TEST(PipelineLayouts, MixWithTheOtherAxes) {
  const std::vector<Degrees> layouts = {
      {.tp = 2, .pp = 2}, {.cp = 2, .pp = 2}, {.pp = 2, .dp = 2}, {.tp = 2, .cp = 2, .pp = 2}};
  for (const char* family : {"qwen3", "qwen3-moe", "NemotronH"}) {
    Case c = ragged(family);
    if (c.family == "qwen3-moe") c.options.router_aux_loss_coef = 0.5;
    expect_all_plans(c, {7}, layouts);
    c.rollouts.groups = 4, c.rollouts.shared_start = 0.8, c.rollouts.nested_prompt = 0.5;
    expect_all_plans(c, {3}, {{.cp = 2, .pp = 2}});
  }
}

// Expects on every stage the bytes of the plan for the stage with most; the first has most waves in flight.
void expect_planned_memory(const Case& c, std::int64_t stages) {
  const PassReport report = run_layout(c, {.pp = stages}).ranks.front().report;
  const TrainingData data(make_rollouts(c.rollouts, c.seed), c.options);
  const auto batch = data.mini_batch(0).rollouts;
  PlanOptions options;
  options.dtype = DType::float64, options.kind = step_kind_of(c.options, shape_of(c), batch);
  const LocalShape first(shape_of(c), {.pp = stages}, Place{});
  const StepPlan& plan = report.plan;
  const StepPlan* plans[] = {&plan};
  PhasePeaks most;
  for (const RankCost& stage :
       forecast(plans, 0, batch, first, options, default_profile("cpu", DType::float64, 1)).stages) {
    const ActivationBytes bytes(LocalShape(shape_of(c), {.pp = stages}, {.pp = stage.pp}), DType::float64, options.kind,
                                options.setting);
    const std::int64_t beside = bytes.constant() + bytes.scratch(plan.max_rows, plan.max_path_rows) +
                                bytes.in_flight(bytes.path(plan.path_rows(), plan.path).stored);
    for (auto phase : {&PhasePeaks::a, &PhasePeaks::b, &PhasePeaks::c})
      if (stage.cost.bytes.*phase > 0) most.*phase = std::max(most.*phase, stage.cost.bytes.*phase - beside);
  }
  EXPECT_EQ(report.arena_bytes.a, most.a);
  EXPECT_EQ(report.arena_bytes.b, most.b);
  EXPECT_EQ(report.arena_bytes.c, most.c);
}

// A stage holds what its waves in flight save.
TEST(PipelineMemory, IsThatOfThePlanOnTheStageWithMost) {
  for (const char* family : {"qwen3", "qwen3-moe"})
    for (const Plan& plan : all_plans({7}))
      for (const std::int64_t stages : {2, 3}) {
        if (plan.schedule == "auto" || plan.trunk_state == "offload") continue;
        SCOPED_TRACE(text_of(family, ", ", plan.name, ", ", stages, " stages"));
        expect_planned_memory(with(ragged(family), plan), stages);
      }
}

// The path of a stage sleeps but for the layer in use.
TEST(PipelineMemory, OfAPathThatSleepsToo) {
  for (const char* trunks : {"keep", "recompute"}) {
    SCOPED_TRACE(trunks);
    Case c = with(ragged("qwen3"), {"", "phased", 7, trunks});
    c.options.path_state = "offload";
    expect_planned_memory(c, 2);
    ASSERT_GT(run_layout(c, {.pp = 2}).ranks.front().report.plan.chosen.path_stored_bytes, 0);
  }
}

// Time as it would be if a product of keys and values took kForward seconds, its backward kBackward, and nothing else
// any: every layer of an item has one of each. A product begins when the one before it on its stage has ended, and the
// same one on the stage that it waits for.
constexpr double kForward = 1, kBackward = 2;

class StageClock {
 public:
  void begin(std::size_t stages) { stages_.assign(stages, Stage{}); }

  void run_forward(std::size_t stage) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<double>& ends = stages_[stage].forward;
    run(stages_[stage], stage > 0 ? stages_[stage - 1].forward.at(ends.size()) : 0.0, kForward, ends);
  }
  void run_backward(std::size_t stage) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<double>& ends = stages_[stage].backward;
    const bool last = stage + 1 == stages_.size();
    run(stages_[stage], last ? 0.0 : stages_[stage + 1].backward.at(ends.size()), kBackward, ends);
  }

  double idle_share() const {
    double longest = 0, busy = 0;
    for (const Stage& stage : stages_) {
      longest = std::max(longest, stage.now);
      busy += stage.busy;
    }
    return 1 - busy / (static_cast<double>(stages_.size()) * longest);
  }

 private:
  struct Stage {
    double now = 0, busy = 0;
    std::vector<double> forward, backward;  // when each product ended
  };

  static void run(Stage& own, double may_begin, double seconds, std::vector<double>& ends) {
    own.now = std::max(own.now, may_begin) + seconds;
    own.busy += seconds;
    ends.push_back(own.now);
  }

  std::mutex mutex_;
  std::vector<Stage> stages_;
};

StageClock stage_clock;
thread_local std::size_t stage_of_thread = 0;
std::int64_t clocked_width = 0;  // of keys and values: no other product of the model has as many outputs

void clocked_linear(const at::Tensor& out, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (out.size(1) == clocked_width) stage_clock.run_forward(stage_of_thread);
  cpu_device().operations().linear(out, x, weight, bias);
}

void clocked_grad_input(const at::Tensor& grad_x, const at::Tensor& grad, const at::Tensor& weight) {
  if (grad.size(1) == clocked_width) stage_clock.run_backward(stage_of_thread);
  cpu_device().operations().linear_grad_input(grad_x, grad, weight);
}

const Operations& clocked_operations() {
  static const Operations clocked = [] {
    Operations operations = cpu_device().operations();
    operations.linear = clocked_linear, operations.linear_grad_input = clocked_grad_input;
    return operations;
  }();
  return clocked;
}

// Everything else is the host's.
class ClockedDevice : public Device {
 public:
  ClockedDevice() : Device(clocked_operations()) {}
  std::string_view name() const override { return "clocked"; }
  void synchronize() override {}
  std::int64_t free_bytes() override { return cpu_device().free_bytes(); }
  std::int64_t held_bytes() override { return cpu_device().held_bytes(); }
  double seconds() override { return cpu_device().seconds(); }
  std::byte* reserve(std::int64_t bytes) override { return cpu_device().reserve(bytes); }
  void release(std::byte* memory, std::int64_t bytes) override { cpu_device().release(memory, bytes); }
  void give_back(std::byte* memory, std::int64_t bytes) override { cpu_device().give_back(memory, bytes); }
  void copy_out(const std::byte* memory, std::int64_t bytes, std::byte* host) override {
    cpu_device().copy_out(memory, bytes, host);
  }
  void copy_in(const std::byte* host, std::int64_t bytes, std::byte* memory) override {
    cpu_device().copy_in(host, bytes, memory);
  }
  at::Tensor view(std::byte* memory, at::IntArrayRef sizes, at::ScalarType dtype) override {
    return cpu_device().view(memory, sizes, dtype);
  }
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype) override {
    return cpu_device().allocate(sizes, dtype);
  }
  at::Tensor to_host(const at::Tensor& tensor) override { return tensor; }
  at::Tensor host_room(const at::Tensor& tensor) override { return tensor; }
  void to_device(const at::Tensor& host, const at::Tensor& tensor) override { cpu_device().to_device(host, tensor); }
  at::Tensor adopt(const at::Tensor& host) override { return host; }
};

struct Measured {
  double idle_share = 0;
  std::int64_t trunks = 0, waves = 0;
};

// Measures the order in which the stages of a model, one layer each, run a step.
Measured measure_stages(const Case& c, std::int64_t stages) {
  ModelShape shape = shape_of(c);
  shape.layer = equal_layers(stages, shape.at(0));
  clocked_width = 2 * attention_of(shape).key_width();
  const TrainingData data(make_rollouts(c.rollouts, c.seed), c.options);
  ClockedDevice device;
  Device& before = bound_device();
  bind_device(device);  // the arenas'
  stage_clock.begin(static_cast<std::size_t>(stages));
  Measured measured;
  double waited = -1;  // by the clock of this machine
  run_ranks({.pp = stages}, [&](const Mesh& mesh) {
    stage_of_thread = static_cast<std::size_t>(mesh.pp.rank());
    ModelState model(LocalShape(shape, mesh.degrees, mesh.place()), DType::float64, device, mesh);
    model.weights.fill_(0.01);
    model.decoder.reserve_positions(data.longest());
    Actor actor(model, c.options, default_profile("cpu", DType::float64, 1));
    const GradientReport report = compute_gradient(actor, data.mini_batch(0), false);
    if (!mesh.writes()) return;
    measured.trunks = report.plan.trunks, measured.waves = report.plan.waves;
    waited = report.idle_share;
  });
  bind_device(before);
  measured.idle_share = stage_clock.idle_share();
  EXPECT_GE(waited, 0);
  EXPECT_LT(waited, 1);
  return measured;
}

TEST(PipelineTime, StagesWaitAsLongAsTheFormulaSays) {
  Case c = ragged("llama-bias");
  c.rollouts = {};
  c.rollouts.groups = 1, c.rollouts.group_size = {6, 6};
  c.rollouts.prompt_length = {8, 8}, c.rollouts.response_length = {6, 6};
  c.options.schedule = "phased", c.options.trunk_state = "keep", c.options.token_budget = 8;
  for (const std::int64_t stages : {2, 4}) {
    const Measured phased = measure_stages(c, stages);
    EXPECT_EQ(phased.trunks, 1);
    EXPECT_GE(phased.waves, 5);
    EXPECT_NEAR(phased.idle_share, idle_share({kForward, kForward, kBackward, kBackward}, phased.waves, stages), 1e-12);
  }
  c.options.schedule = "dense", c.options.token_budget = 14;
  const Measured dense = measure_stages(c, 4);
  EXPECT_EQ(dense.trunks, 0);
  EXPECT_NEAR(dense.idle_share, idle_share({0, kForward, kBackward, 0}, dense.waves, 4), 1e-12);
  EXPECT_NEAR(idle_share({0, kForward, kBackward, 0}, 6, 4), 3.0 / 9, 1e-12) << "(S - 1) / (N + S - 1)";
}

}  // namespace
}  // namespace espalier::testing
