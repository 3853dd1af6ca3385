// LoRA: adapters have the gradient that the chain rule gives of W + s B A, under every plan; what is held costs
// nothing.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include "espalier/base/error.h"
#include "espalier/config/model_families.h"
#include "espalier/forecast/flops.h"
#include "espalier/forecast/memory_model.h"
#include "espalier/model/products.h"
#include "tests/equivalence/fixture.h"
#include "tests/support/layers.h"

namespace espalier::testing {
namespace {

// A joined projection of two parts, the second with an adapter, against plain products.
class AdaptedProducts : public ::testing::Test {
 protected:
  static constexpr std::int64_t R = 7, K = 6, N = 5, r = 3;
  static at::Tensor normal(at::IntArrayRef sizes) { return at::randn(sizes, at::kDouble); }
  static at::Tensor part(const at::Tensor& whole) { return whole.narrow(1, N, N); }
  static double difference(const at::Tensor& a, const at::Tensor& b) { return (a - b).abs().max().item<double>(); }

  static constexpr double kScale = 1.75, kBound = 1e-13;
  const at::Tensor x = normal({R, K}), grad = normal({R, 2 * N}), a = normal({r, K}), b = normal({N, r});
  const Projection projection{normal({2 * N, K}), normal({2 * N}), {{a, b, N, kScale}}};
  Arena arena{1 << 20, cpu_device()};
  const Products products{cpu_device().operations(), nullptr, mesh_of_one().tp, arena};
};

TEST_F(AdaptedProducts, OutputsHaveTheAdaptersPart) {
  at::Tensor expected = at::mm(x, projection.weight.t()) + projection.bias;
  part(expected).add_(at::mm(at::mm(x, a.t()), b.t()), kScale);
  const at::Tensor out = at::empty({R, 2 * N}, at::kDouble), base = normal({R, 2 * N});
  products.linear(out, x, projection);
  EXPECT_LE(difference(out, expected), kBound);
  products.linear_onto(out, base, x, projection);
  EXPECT_LE(difference(out, base + expected), kBound);
}

TEST_F(AdaptedProducts, TheGradientOfTheInputHasTheAdaptersPart) {
  const at::Tensor expected = at::mm(grad, projection.weight) + kScale * at::mm(at::mm(part(grad), b), a),
                   start = normal({R, K});
  at::Tensor out = at::empty({R, K}, at::kDouble);
  products.linear_grad_input(out, grad, projection);
  EXPECT_LE(difference(out, expected), kBound);
  out = start.clone();
  products.add_linear_grad_input(out, grad, projection);
  EXPECT_LE(difference(out, start + expected), kBound);
}

TEST_F(AdaptedProducts, TheGradientsOfBothMatricesAreAdded) {
  const at::Tensor start_a = normal({r, K}), start_b = normal({N, r});
  const Projection grads{{}, {}, {{start_a.clone(), start_b.clone(), N, kScale}}};
  products.add_linear_grad_weight(grads, projection, grad, x, at::Tensor());
  EXPECT_LE(difference(grads.low_rank[0].a_rK, start_a + kScale * at::mm(at::mm(part(grad), b).t(), x)), kBound) << "A";
  EXPECT_LE(difference(grads.low_rank[0].b_Nr, start_b + kScale * at::mm(part(grad).t(), at::mm(x, a.t()))), kBound)
      << "B";
  EXPECT_EQ(arena.in_use(), 0);
}

const std::vector<std::string> kTargets = {"all-linear", "q_proj,v_proj", "k_proj", "o_proj",
                                           "model[.]layers[.]1[.].*_proj"};

Case adapted(const std::string& family, const std::string& target) {
  Case c = ragged(family);
  c.options.lora_rank = 3, c.options.lora_alpha = 7, c.options.lora_target = target;
  return c;
}

std::vector<std::string> targets_of(const std::string& family) {
  std::vector<std::string> targets = kTargets;
  if (family.find("moe") == family.npos) targets.insert(targets.end(), {"gate_proj", "up_proj", "down_proj"});
  if (family.find("moe") != family.npos) targets.back() = "model[.]layers[.]1[.]self_attn.*";
  return targets;
}

class Adapters : public ::testing::TestWithParam<const char*> {};

TEST_P(Adapters, HaveTheGradientOfTheChainRuleUnderEveryPlan) {
  for (const std::string& target : targets_of(GetParam())) {
    const OracleResult exact = run_oracle(adapted(GetParam(), target));
    for (const Plan& plan : all_plans({7})) {
      SCOPED_TRACE(text_of(GetParam(), ", ", target, ", ", plan.name));
      const Case c = with(adapted(GetParam(), target), plan);
      const Worst worst = worst_parameter(c, run_case(c).gradient, exact.gradient);
      EXPECT_LE(worst.error, kFloat64) << worst.parameter;
    }
  }
}

TEST_P(Adapters, TrainBesideWhatTheWordsName) {
  Case c = adapted(GetParam(), "q_proj,o_proj");
  c.options.train = "norms,embeddings", c.options.use_rslora = true;
  const OracleResult exact = run_oracle(c);
  for (const Plan& plan : all_plans({7})) {
    const Worst worst = worst_parameter(c, run_case(with(c, plan)).gradient, exact.gradient);
    EXPECT_LE(worst.error, kFloat64) << worst.parameter << ", " << plan.name;
  }
}

TEST_P(Adapters, TakeOfTheArenaWhatWasPredicted) {
  for (const std::string target : {"all-linear", "q_proj,v_proj", "o_proj"})
    for (const Plan& plan : all_plans({9}))
      for (const DType dtype : {DType::float32, DType::bfloat16}) {
        SCOPED_TRACE(text_of(GetParam(), ", ", target, ", ", plan.name, ", ", name_of(dtype)));
        const Case c = with(adapted(GetParam(), target), plan);
        const GradientReport report = run_case(c, dtype).report;
        const PhasePeaks predicted = predicted_arena_bytes(c, report.plan, dtype), &taken = report.arena_bytes;
        EXPECT_EQ(taken.a, predicted.a);
        EXPECT_EQ(taken.b, predicted.b);
        EXPECT_EQ(taken.c, predicted.c);
      }
}

TEST_P(Adapters, NeitherGradientNorMomentIsHeldOfTheWeightsBesideThem) {
  const Case c = adapted(GetParam(), "all-linear");
  const auto model = tiny_model(GetParam(), DType::float32, 1, false, mesh_of_one(), choice_of(c.options));
  AdamW optimizer(model->table, model->weights, {});
  std::int64_t expected = 0;
  for (const AddedPair& pair : added_pairs(model->shape)) {
    const Parameter& weight = model->held_table.at(pair.weight);
    expected += 3 * (weight.shape[0] + weight.shape[1]);
  }
  EXPECT_EQ(model->table.size(), expected);
  EXPECT_EQ(optimizer.exp_avg().numel(), expected);
  EXPECT_EQ(model->shape.parameters(), expected + tiny_shape(GetParam()).parameters());
}

INSTANTIATE_TEST_SUITE_P(Models, Adapters,
                         ::testing::Values("llama", "llama-bias", "qwen2", "qwen3", "qwen3-moe", "qwen3-moe-sparse",
                                           "qwen3-window"),
                         [](const auto& one) { return name_of_family(one.param); });

// Every module of the model that can have an adapter. No matrix holds what one of a tied head adds.
std::string every_target(const ModelShape& shape) {
  std::string target = "all-linear";
  if (!shape.tied_head) target += ",lm_head";
  if (shape.experts > 0) target += std::string(",experts,") + module_name(shape.names.router);
  return target;
}

class AdaptersOfRows : public ::testing::TestWithParam<std::string> {};

TEST_P(AdaptersOfRows, HaveTheGradientOfTheChainRule) {
  const Case c = adapted(GetParam(), every_target(tiny_shape(GetParam())));
  const OracleResult exact = run_oracle(c);
  for (const Plan& plan : all_plans({7})) {
    const Worst worst = worst_parameter(c, run_case(with(c, plan)).gradient, exact.gradient);
    EXPECT_LE(worst.error, kFloat64) << worst.parameter << ", " << plan.name;
  }
}

TEST_P(AdaptersOfRows, TakeOfTheArenaWhatWasPredicted) {
  const ModelShape shape = tiny_shape(GetParam());
  const std::string output = GetParam() == "Lfm2" ? "out_proj" : "o_proj";
  for (const std::string& target : {every_target(tiny_shape(GetParam())), output}) {
    if (target == output && GetParam() == "qwen3-next-all") continue;
    for (const Plan& plan : all_plans({9}))
      for (const DType dtype : {DType::float32, DType::bfloat16}) {
        SCOPED_TRACE(text_of(target, ", ", plan.name, ", ", name_of(dtype)));
        const Case c = with(adapted(GetParam(), target), plan);
        const GradientReport report = run_case(c, dtype).report;
        const PhasePeaks predicted = predicted_arena_bytes(c, report.plan, dtype), &taken = report.arena_bytes;
        if (shape.router.wide && dtype == DType::bfloat16) {  // the widened A and B of a router are a bound
          EXPECT_TRUE(taken.a <= predicted.a && taken.b <= predicted.b && taken.c <= predicted.c);
          continue;
        }
        EXPECT_EQ(taken.a, predicted.a);
        EXPECT_EQ(taken.b, predicted.b);
        EXPECT_EQ(taken.c, predicted.c);
      }
  }
}

std::vector<std::string> rows_and_variants() {
  std::vector<std::string> out = {"qwen3-next",     "qwen3-next-plain", "qwen3-next-last", "qwen3-next-moe",
                                  "qwen3-moe-late", "gemma4-reads",     "gemma4-moe"};
  for (const Family& row : model_families())
    if (takes_additions(tiny_shape(row.name))) out.push_back(row.name);
  return out;
}
INSTANTIATE_TEST_SUITE_P(Families, AdaptersOfRows, ::testing::ValuesIn(rows_and_variants()),
                         [](const auto& one) { return name_of_family(one.param); });

TEST(AdapterFlops, AreTwoThirdsOfAFullUpdateAndTheAdaptersOwn) {
  ModelShape shape = tiny_shape("qwen3");
  shape.hidden = 2048;
  set_inner(shape, 6144);
  change_attention(shape, [](AttentionShape& a, std::size_t) { a.heads = 16, a.kv_heads = 8, a.head_dim = 128; });
  const Work work = work_of_depths(0, 1000, true);
  const auto both = [&](const ModelShape& s) {
    Flops flops = forward_flops(s, work);
    flops += backward_flops(s, work);
    return flops.layers;
  };
  const ModelShape adapted =
      train_only(shape, TrainedChoice("all", AdditionChoice{.rank = 16, .modules = {}, .directory = {}}));
  std::int64_t low_rank = 0;
  for (const LayerShape& layer : adapted.layer) low_rank += layer_parameters(adapted, layer).low_rank();
  EXPECT_NEAR(both(adapted), 2.0 / 3 * both(shape) + 8.0 * 1000 * static_cast<double>(low_rank), 1e-9 * both(shape));
}

TEST(AdapterTargets, OfNothingOrOfWhatCannotHaveOneAreRefused) {
  const auto choice = [](const std::string& target, std::int64_t rank = 3, const std::string& words = "all") {
    return TrainedChoice(words, AdditionChoice{.rank = rank, .target = target, .modules = {}, .directory = {}});
  };
  for (const char* target :
       {"", "nothing", "q_proj,", "embed_tokens", "(", "model[.]embed_tokens", "experts", "model.*"})
    EXPECT_THROW(train_only(tiny_shape("qwen3"), choice(target)), OptionError) << target;
  for (const char* target : {"gate_proj", "down_proj", "experts.3.up_proj", "model.*"})
    EXPECT_THROW(train_only(tiny_shape("qwen3-moe"), choice(target)), OptionError) << target;
  EXPECT_THROW(train_only(tiny_shape("llama"), choice("lm_head", 3, "head")), OptionError);
  EXPECT_THROW(train_only(tiny_shape("qwen3"), choice("all-linear", 25)), OptionError);
  EXPECT_THROW(train_only(tiny_shape("NemotronH"), choice("all-linear")), UnsupportedError);
  EXPECT_THROW(train_only(tiny_shape("qwen3"), choice("q_proj", 3, "attention")), OptionError);
}

}  // namespace
}  // namespace espalier::testing
