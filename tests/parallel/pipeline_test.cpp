// Layers divided over stages: the gradient of one process, and the time that stages wait for each other.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "espalier/ops/operations.h"
#include "espalier/plan/pipeline_time.h"
#include "espalier/train/training_data.h"
#include "tests/parallel/layouts.h"

namespace espalier::testing {
namespace {

Case ragged(const std::string& family) {
  Case c;
  c.family = family;
  c.rollouts = ragged_rollouts();
  return c;
}

class Pipeline : public ::testing::TestWithParam<const char*> {};

// Three layers. Embeddings are tied in llama-bias and qwen3: its first and last stage both have a gradient of them.
TEST_P(Pipeline, EveryPlanGivesTheGradientOfOneProcess) {
  expect_all_plans(ragged(GetParam()), {0, 7}, {{.pp = 2}, {.pp = 3}});
}
TEST_P(Pipeline, ACriticToo) { expect_all_plans(as_critic(ragged(GetParam())), {7}, {{.pp = 2}}); }
INSTANTIATE_TEST_SUITE_P(Models, Pipeline,
                         ::testing::Values("llama", "llama-bias", "qwen2", "qwen3-pad", "qwen3", "qwen3-moe",
                                           "qwen3-moe-sparse", "qwen3-moe-late"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::erase(name, '-');
                           return name;
                         });

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
  for (const char* family : {"qwen3", "qwen3-moe"}) {
    Case c = ragged(family);
    if (c.family == "qwen3-moe") c.options.router_aux_loss_coef = 0.5;
    expect_all_plans(c, {7}, layouts);
    c.rollouts.groups = 4, c.rollouts.shared_start = 0.8, c.rollouts.nested_prompt = 0.5;
    expect_all_plans(c, {3}, {{.cp = 2, .pp = 2}});
  }
}

// The processors of this machine, on which the products of keys and values take so long that nothing else counts: one
// of each in every layer of an item, forward and backward.
constexpr std::chrono::milliseconds kForward{60}, kBackward{120};
std::int64_t slow_width = 0;

void slow_linear(const at::Tensor& out, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (out.size(1) == slow_width) std::this_thread::sleep_for(kForward);
  cpu_device().operations().linear(out, x, weight, bias);
}

void slow_grad_input(const at::Tensor& grad_x, const at::Tensor& grad, const at::Tensor& weight) {
  if (grad.size(1) == slow_width) std::this_thread::sleep_for(kBackward);
  cpu_device().operations().linear_grad_input(grad_x, grad, weight);
}

const Operations& slow_operations() {
  static const Operations slow = [] {
    Operations operations = cpu_device().operations();
    operations.linear = slow_linear, operations.linear_grad_input = slow_grad_input;
    return operations;
  }();
  return slow;
}

// Everything else is the host's.
class SlowDevice : public Device {
 public:
  SlowDevice() : Device(slow_operations()) {}
  std::string_view name() const override { return "slow"; }
  void synchronize() override {}
  std::int64_t free_bytes() override { return cpu_device().free_bytes(); }
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

// Of a model with a layer a stage.
double measured_idle_share(const Case& c, std::int64_t stages) {
  ModelShape shape = shape_of(c);
  shape.layers = stages;
  slow_width = 2 * shape.kv_heads * shape.head_dim;
  const TrainingData data(make_rollouts(c.rollouts, c.seed), c.options);
  SlowDevice device;
  Device& before = bound_device();
  bind_device(device);  // the arenas'
  double share = 0;
  run_ranks({.pp = stages}, [&](const Mesh& mesh) {
    ModelState model(LocalShape(shape, mesh.degrees, mesh.place()), DType::float64, device, mesh);
    model.weights.fill_(0.01);
    model.decoder.reserve_positions(data.longest());
    Actor actor(model, c.options, default_profile("cpu", DType::float64, 1));
    const GradientReport report = compute_gradient(actor, data.mini_batch(0), false);
    if (mesh.writes()) share = report.idle_share;
  });
  bind_device(before);
  return share;
}

// Work beside the slow products, and waking up, takes milliseconds of 60, on a busy machine ten: it lengthens every
// event by about the same, which leaves the share as it is, and is uneven by a fraction of that. 0.05 is a third of
// what one stage more or less would change.
TEST(PipelineTime, StagesWaitAsLongAsTheFormulaSays) {
  Case c = ragged("llama-bias");  // no other product has as many outputs as that of keys and values
  c.rollouts = {};
  c.rollouts.groups = 1, c.rollouts.group_size = {6, 6};
  c.rollouts.prompt_length = {8, 8}, c.rollouts.response_length = {6, 6};
  c.options.token_budget = 8;
  const double f = 0.060, b = 0.120;
  c.options.schedule = "phased", c.options.trunk_state = "keep";
  EXPECT_NEAR(measured_idle_share(c, 4), idle_share({f, f, b, b}, 6, 4), 0.05) << "a trunk and six waves";
  c.options.schedule = "dense", c.options.token_budget = 14;
  EXPECT_NEAR(measured_idle_share(c, 4), idle_share({0, f, b, 0}, 6, 4), 0.05) << "six waves";
  EXPECT_NEAR(idle_share({0, f, b, 0}, 6, 4), 3.0 / 9, 1e-12);
}

}  // namespace
}  // namespace espalier::testing
