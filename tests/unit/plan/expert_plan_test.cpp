// A plan for Qwen3-30B-A3B from its config.json alone, against sums by hand.
#include <gtest/gtest.h>

#include "espalier/base/json.h"
#include "espalier/config/model_config.h"
#include "espalier/forecast/memory_model.h"
#include "espalier/shape/path_leaves.h"
#include "tests/unit/plan/shapes.h"

namespace espalier {
namespace {

ModelShape published_shape() {
  return model_shape_of(Json::parse(R"({"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false,
    "attention_dropout": 0.0, "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
    "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
    "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": false,
    "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
    "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true,
    "use_sliding_window": false, "vocab_size": 151936})"),
                        "config.json");
}

// Weights that a row meets: q and o, k and v, router, 8 experts of 3 matrices.
constexpr double kQueryOutput = 2.0 * 2048 * 4096, kKeyValue = 2.0 * 2048 * 512, kRouter = 2048.0 * 128,
                 kExperts = 8 * 3.0 * 2048 * 768;
// Bytes of a row and layer in bfloat16: q and attended, k and v, mid stream, gate and up of 8 experts, router logits;
// in 4 bytes: lse of 32 heads, two 1/rms, 8 choices, 8 weights.
constexpr std::int64_t kKeyValueBytes = 2 * 2 * 512 + 4,
                       kRest = 2 * (2 * 4096 + 2048 + 8 * 2 * 768 + 128) + 4 * (32 + 1 + 8 + 8);

TEST(ExpertPlan, ReadsThePublishedConfiguration) {
  const ModelShape shape = published_shape();
  EXPECT_EQ(shape.experts, 128);
  EXPECT_EQ(shape.experts_per_token, 8);
  EXPECT_TRUE(shape.norm_topk_prob);
  EXPECT_EQ(shape.parameters(), 30'532'122'624);  // as published
  EXPECT_EQ(kv_bytes_per_token(shape, DType::bfloat16), 96 * 1024);
}

TEST(ExpertPlan, FlopsAreThoseOfASumByHand) {
  const ModelShape shape = published_shape();
  const double row = 2 * 48 * (kQueryOutput + kKeyValue + kRouter + kExperts);
  const Work all = work_of_depths(0, 4096, true);
  EXPECT_NEAR(row, 5.46e9, 0.01e9);  // 3.3 billion active parameters, of which 0.6 are embedding and head
  EXPECT_DOUBLE_EQ(forward_flops(shape, all).layers + forward_flops(shape, all).experts, 4096 * row);
  EXPECT_DOUBLE_EQ(forward_flops(shape, all).attention, 48.0 * 4 * 32 * 128 * 4096 * 4097 / 2);
  EXPECT_DOUBLE_EQ(forward_flops(shape, all).head, 2.0 * 4096 * 2048 * 151936);
  // A prompt without edges leaves out what the last layer does after keys and values.
  const Flops prompt = forward_flops(shape, work_of_depths(0, 4096, false));
  EXPECT_DOUBLE_EQ(prompt.layers + prompt.experts, 4096 * (row - 2 * (kQueryOutput + kRouter + kExperts)));
}

TEST(ExpertPlan, SavedBytesAreThoseOfASumByHand) {
  const ModelShape shape = published_shape();
  const ActivationBytes bytes(shape, DType::bfloat16), routed(shape, DType::bfloat16, {.all_rows_choose = true});
  const std::int64_t T = 4096, outputs = 3 * 2 * 2048 + 4, stream = 2 * 2048;
  const Work all = work_of_depths(0, T, true), prompt = work_of_depths(0, T, false);
  EXPECT_EQ(bytes.saved(all, SavedState::keep), T * (48 * (stream + kKeyValueBytes + kRest) + outputs));
  EXPECT_EQ(bytes.saved(prompt, SavedState::keep), T * (48 * (stream + kKeyValueBytes) + 47 * kRest));
  EXPECT_EQ(bytes.saved(prompt, SavedState::recompute), T * 48 * stream);
  // With a router loss the last layer runs the prompt too, and leaves a stream behind it.
  EXPECT_EQ(routed.saved(prompt, SavedState::keep), T * (48 * (stream + kKeyValueBytes + kRest) + stream));
}

TEST(ExpertPlan, PhasesOfAStepArePredictedFromTheConfigurationAlone) {
  const ModelShape shape = published_shape();
  const std::vector<Rollout> batch = testing::group_of(4097, 1024, 16);
  PlanOptions options;
  options.dtype = DType::bfloat16;
  options.schedule = Schedule::phased, options.token_budget = 8192, options.trunk_state = SavedState::keep;
  const StepPlan plan = make_plan(batch, build_prefix_trees(batch, ShareMode::whole_trees), shape, options,
                                  default_profile("cuda", DType::bfloat16, 1));
  EXPECT_EQ(plan.trunk_rows, 4096);
  EXPECT_EQ(plan.wave_rows, 16 * 1024 + plan.waves);
  const ActivationBytes bytes(shape, DType::bfloat16);
  // Weights 2, gradients 4, moments 8, masters 4 bytes a parameter; 96 KiB of keys and values a token, and twice that
  // for their gradients.
  const double held = 18.0 * 30'532'122'624 + 4096 * 3.0 * 96 * 1024;
  const double trunk = static_cast<double>(bytes.saved(work_of_depths(0, 4096, false), SavedState::keep));
  const double wave = plan.max_rows * 48.0 * static_cast<double>(2 * 2048 + kKeyValueBytes + kRest);
  const double a = static_cast<double>(plan.chosen.bytes.a), b = static_cast<double>(plan.chosen.bytes.b),
               c = static_cast<double>(plan.chosen.bytes.c);
  // Beside these: the process, scratch of one layer, one block of logits; well below 20 GB.
  EXPECT_GT(a, held + trunk);
  EXPECT_LT(a, held + trunk + 20e9);
  EXPECT_GT(plan.max_rows, 4096);  // it is a wave's
  EXPECT_GT(b, held + trunk + wave);
  EXPECT_LT(b, held + trunk + wave + 20e9);
  EXPECT_GT(c, held + trunk);
  EXPECT_LT(c, a + 20e9);
}

}  // namespace
}  // namespace espalier
