#include "tests/unit/plan/shapes.h"

#include <numeric>

#include "espalier/mixers/attention/shape.h"

namespace espalier::testing {

namespace {

AttentionShape heads(std::int64_t count, std::int64_t kv_heads, std::int64_t head_dim, bool qk_norm) {
  AttentionShape attention;
  attention.heads = count, attention.kv_heads = kv_heads, attention.head_dim = head_dim, attention.qk_norm = qk_norm;
  return attention;
}

}  // namespace

ModelShape tiny_shape() {
  ModelShape shape;
  shape.architecture = "Qwen3ForCausalLM";
  shape.hidden = 64, shape.vocabulary = 512, shape.max_positions = 4096, shape.tied_head = true;
  shape.layer = attention_layers(3, heads(4, 2, 16, true), 96);
  return shape;
}

ModelShape llama_3_8b() {
  ModelShape shape;
  shape.architecture = "LlamaForCausalLM";
  shape.hidden = 4096, shape.vocabulary = 128256, shape.max_positions = 131072;
  shape.layer = attention_layers(32, heads(32, 8, 128, false), 14336);
  return shape;
}

ModelShape qwen3_30b_a3b() {
  ModelShape shape;
  shape.architecture = "Qwen3MoeForCausalLM";
  shape.hidden = 2048, shape.vocabulary = 151936, shape.max_positions = 40960;
  shape.experts = 128, shape.experts_per_token = 8, shape.expert_inner = 768, shape.norm_topk_prob = true;
  shape.layer = attention_layers(48, heads(32, 4, 128, true), 6144, MlpKind::experts);
  return shape;
}

MachineProfile test_profile() { return default_profile("cpu", DType::float32, 2); }

std::vector<Rollout> group_of(std::int32_t prompt, std::int32_t response, std::int32_t count, std::int32_t first) {
  std::vector<Rollout> batch(count);
  for (std::int32_t i = 0; i < count; ++i) {
    batch[i].prompt_ids.resize(prompt);
    std::iota(batch[i].prompt_ids.begin(), batch[i].prompt_ids.end(), first);
    batch[i].response_ids.resize(response);
    std::iota(batch[i].response_ids.begin(), batch[i].response_ids.end(), first + 1000 * (i + 1));
    batch[i].loss_mask.assign(response, 1);
  }
  return batch;
}

StepPlan planned(const std::vector<Rollout>& batch, const PlanOptions& options, ShareMode share,
                 const LocalShape& shape) {
  return make_plan(batch, build_prefix_trees(batch, share), shape, options, test_profile());
}

}  // namespace espalier::testing
