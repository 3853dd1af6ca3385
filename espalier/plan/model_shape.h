// The numbers of a model that decide cost and memory, read from a Hugging Face config.json. No weights, no tensors.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "espalier/base/dtype.h"
#include "espalier/base/json_fwd.h"

namespace espalier {

// Llama 3.x frequency scaling ("rope_type": "llama3").
struct RopeScaling {
  double factor = 1, low_freq_factor = 1, high_freq_factor = 4;
  std::int64_t original_max_position_embeddings = 8192;
};

// The products of a layer whose weights or biases have gradients.
struct TrainedLayer {
  bool query = true, key_value = true, output = true, router = true, gate_up = true, down = true;
};

// Which parameters train (--train, plan/trained_parameters.h); all by default. The others are held: they have no
// gradient, master or moment. A backward runs from the last layer to `first_layer`.
struct TrainedParameters {
  std::string words = "all";
  std::shared_ptr<const std::vector<bool>> of_parameter;  // in the order of for_each_parameter; null: all
  std::vector<TrainedLayer> of_layer;                     // one per layer; empty: all
  bool head = true;                                       // the matrix of the head
  std::int64_t first_layer = 0;                           // layers before it have no backward
  bool input = true;  // the gradient of the first layer's input is used: by the embedding, or by the stage of pp before

  bool all() const { return of_parameter == nullptr; }
};

struct ModelShape {
  std::string architecture;                            // "LlamaForCausalLM", ...
  std::int64_t layers = 0, hidden = 0, inner = 0;      // L, M, F
  std::int64_t heads = 0, kv_heads = 0, head_dim = 0;  // H, J, D
  std::int64_t vocabulary = 0;                         // V
  std::int64_t max_positions = 0;
  double rms_norm_eps = 1e-6;
  double rope_theta = 10000;
  bool has_rope_scaling = false;
  RopeScaling rope_scaling;
  bool tied_head = false;
  std::int64_t pad_token = -1;  // its look-ups in the embedding have no gradient (nn.Embedding's padding_idx); -1: none
  bool value_head = false;      // a critic: one number a row (score.weight [1, M], score.bias [1]), tied to nothing
  bool qkv_bias = false;        // q, k, v projections (Qwen2, or attention_bias)
  bool output_bias = false;     // o projection (Llama with attention_bias)
  bool mlp_bias = false;        // Llama with mlp_bias
  bool qk_norm = false;         // Qwen3
  double initializer_range = 0.02;
  // Mixture of experts; experts = 0: dense.
  std::int64_t experts = 0, experts_per_token = 0, expert_inner = 0;
  bool norm_topk_prob = false;
  std::vector<std::uint8_t> expert_layer;  // one per layer, 1: its MLP is experts
  // Rows of some layers see themselves and the window - 1 rows above them on their way, those of the others all rows.
  std::int64_t window = 0;                 // 0: no layer has a window
  std::vector<std::uint8_t> window_layer;  // one per layer, 1: it has
  DType stored_dtype = DType::float32;     // of the config, or once weights are read theirs
  TrainedParameters trained;

  bool has_experts(std::int64_t layer) const {  // in place of a dense MLP
    return !expert_layer.empty() && expert_layer[static_cast<std::size_t>(layer)] != 0;
  }
  std::int64_t expert_layers() const;  // how many have them
  // Rows that a row of the layer sees at most, itself included; 0: all above it.
  std::int64_t window_of(std::int64_t layer) const {
    return !window_layer.empty() && window_layer[static_cast<std::size_t>(layer)] != 0 ? window : 0;
  }
  std::int64_t parameters() const;  // tied weights once (plan/parameter_shapes.h)
  std::int64_t qkv_width() const { return (heads + 2 * kv_heads) * head_dim; }
  std::int64_t head_width() const { return value_head ? 1 : vocabulary; }  // numbers a row gets from the head
};

// Errors: InputError (missing file, bad JSON, missing or absurd member, with the member's name), UnsupportedError for
// what is known but refused (mathematics, section 8: dropout, kinds of layers that no family here has, other rope
// types, other activations than SiLU, other architectures).
ModelShape read_model_shape(const std::filesystem::path& directory_or_config);
ModelShape model_shape_of(const Json& config, const std::string& where);

// A critic's shape, with value_head set. In ...ForTokenClassification with one label the head is stored with the
// weights; of ...ForCausalLM the blocks are taken and the head is new. Dropout before the head (classifier_dropout) is
// none, as in verl. `architecture` names the token classifier in both cases. Errors: as above.
struct CriticShape {
  ModelShape shape;
  bool head_is_stored = false;
};
CriticShape read_critic_shape(const std::filesystem::path& directory_or_config);
CriticShape critic_shape_of(const Json& config, const std::string& where);

}  // namespace espalier
