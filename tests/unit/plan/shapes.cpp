#include "tests/unit/plan/shapes.h"

#include <numeric>

namespace espalier::testing {

ModelShape tiny_shape() {
  ModelShape shape;
  shape.architecture = "Qwen3ForCausalLM";
  shape.layers = 3, shape.hidden = 64, shape.inner = 96;
  shape.heads = 4, shape.kv_heads = 2, shape.head_dim = 16;
  shape.vocabulary = 512, shape.max_positions = 4096;
  shape.qk_norm = true, shape.tied_head = true;
  shape.expert_layer.assign(3, 0);
  return shape;
}

ModelShape llama_3_8b() {
  ModelShape shape;
  shape.architecture = "LlamaForCausalLM";
  shape.layers = 32, shape.hidden = 4096, shape.inner = 14336;
  shape.heads = 32, shape.kv_heads = 8, shape.head_dim = 128;
  shape.vocabulary = 128256, shape.max_positions = 131072;
  shape.expert_layer.assign(32, 0);
  return shape;
}

ModelShape qwen3_30b_a3b() {
  ModelShape shape;
  shape.architecture = "Qwen3MoeForCausalLM";
  shape.layers = 48, shape.hidden = 2048, shape.inner = 6144;
  shape.heads = 32, shape.kv_heads = 4, shape.head_dim = 128;
  shape.vocabulary = 151936, shape.max_positions = 40960, shape.qk_norm = true;
  shape.experts = 128, shape.experts_per_token = 8, shape.expert_inner = 768, shape.norm_topk_prob = true;
  shape.expert_layer.assign(48, 1);
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
