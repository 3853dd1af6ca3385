// The numbers of a model that decide cost and memory, read from a Hugging Face config.json. No weights, no tensors.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "espalier/base/dtype.h"
#include "espalier/base/json_fwd.h"
#include "espalier/shape/block_kinds.h"

namespace espalier {

// The rescaling of rotary frequencies ("rope_type"; equations in model/rotary.h).
enum class RopeType : std::uint8_t { llama3, linear, yarn, longrope };
struct RopeScaling {
  double factor = 1, low_freq_factor = 1, high_freq_factor = 4;
  std::int64_t original_max_position_embeddings = 8192;
  RopeType type = RopeType::llama3;
  double attention_factor = 1;                              // cos and sin are multiplied by it (yarn, longrope)
  double beta_fast = 32, beta_slow = 1;                     // yarn
  bool truncate = true;                                     // yarn: the ramp's ends are whole numbers
  std::vector<double> short_factor = {}, long_factor = {};  // longrope, one per frequency

  // Whether the rows of a longrope step rotate by long_factor. The step's longest rollout, of `longest` tokens, decides
  // for all rows.
  bool is_long(std::int64_t longest) const { return longest > original_max_position_embeddings; }
};

// The rotation of some layers.
struct Rope {
  double theta = 10000;
  bool has_scaling = false;
  RopeScaling scaling;
};

// The places of a block's norms: x + f(norm(x)), x + norm(f(norm(x))), x + norm(f(x)).
enum class NormPlace : std::uint8_t { before, both, after };

// Parts of attention besides q, k and v. 0 or false: absent.
struct AttentionShape {
  double scale = 0;          // of q k; 0: 1/sqrt(head_dim)
  double soft_cap = 0;       // scores become cap tanh(score / cap)
  std::int64_t rotary = 0;   // the first channels of a head, which rotate; 0: all of them
  bool interleaved = false;  // channels 2i and 2i + 1 rotate together, not i and i + rotary/2
  bool wide_norm = false;    // qk_norm is over all heads of a row, not over each head
  bool sinks = false;        // a trained logit per head joins each row's softmax; it has no value
  bool output_gate = false;  // q_proj gives query and gate [2 D] per head; attended values times sigmoid(gate)
  // Rotated queries of position p are multiplied by 1 + query_growth log(1 + floor(p / growth_length)) (Ministral 3).
  double query_growth = 0;
  std::int64_t growth_length = 0;
};

// Latent attention (DeepSeek-V2, DeepSeek-V3): a row is projected to a narrow latent, and the latent's norm to heads. A
// head of queries and keys has channels without rotation, then channels that rotate. The rotated channels of keys are
// one row for all heads, projected beside the latent.
struct LatentShape {
  std::int64_t query = 0;                         // C of queries; 0: their heads are projected from the rows
  std::int64_t key_value = 0;                     // C of keys and values; 0: there is no latent attention
  std::int64_t plain = 0, rotary = 0, value = 0;  // channels of a head: of q and k, without and with rotation; of v
  double norm_eps = 1e-6;

  std::int64_t heads() const { return plain + value; }  // channels that the keys' and values' latent gives to a head
};

// Factors and caps that are the same in all layers.
struct Scales {
  double embedding = 1, residual = 1;  // of looked-up rows; of what each half of a block adds
  double logits = 1;                   // logits are multiplied by it
  double logit_cap = 0;                // then become cap tanh(logit / cap); 0: not
};

// How a router scores and chooses (ops/experts.h). The defaults are a softmax and its k largest.
struct RouterKind {
  bool sigmoid = false;                     // scores are sigmoids of the logits
  bool correction_bias = false;             // is added to the scores for the choice alone; held, never trained
  bool after_choice = false;                // the softmax is over the chosen logits alone
  bool bias = false;                        // of the router's projection
  bool wide = false;                        // logits, and weights, are float32 in bfloat16 models too
  std::int64_t groups = 1, top_groups = 1;  // experts are chosen from the best groups
  double scaling = 1;                       // of the weights
};

// An MLP beside the experts, which every row has; inner = 0: none.
struct SharedExpert {
  std::int64_t inner = 0;
  bool gate = false;  // its output times sigmoid(row . gate weight)
};

// The operation that mixes the rows of a layer.
enum class Mixer : std::uint8_t { attention, delta_rule };

// The gated delta rule (Qwen3-Next, Qwen3.5), the same with a decay for each key channel (Kimi Linear), or Mamba-2,
// which does not read its state before it writes: all behind a short convolution (ops/delta_rule.h).
struct DeltaRuleShape {
  std::int64_t key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;  // sizes of one head
  std::int64_t kernel = 0;                                                  // rows of the convolution
  // The columns of a projected row: q, k, v, z, b, a, each for all heads (Qwen3.5); or q, k, v, z by key head, then b,
  // a by key head (Qwen3-Next).
  bool by_key_head = false;
  // Mamba-2: a row is projected to z, v, k, q of all heads and one number a head; the convolution's channels are v, k,
  // q, with biases or without; the step of a row is within [least_step, largest_step].
  bool mamba = false, conv_bias = false;
  double least_step = 0, largest_step = std::numeric_limits<double>::infinity();
  // Kimi Linear: each key channel of a head has a decay of its own, z is gated by a sigmoid, and there are as many key
  // heads as value heads. The columns of a projected row are q, k, v, b, z, a. z and a are projected through a
  // latent of this width each; 0: decays are of heads.
  std::int64_t gate_latent = 0;

  bool decays_channels() const { return gate_latent > 0; }
  std::int64_t decays() const { return value_heads * (decays_channels() ? key_dim : 1); }  // columns of a
  std::int64_t channels() const { return 2 * key_heads * key_dim + value_width(); }        // of the convolution
  std::int64_t value_width() const { return value_heads * value_dim; }
  std::int64_t projected() const { return channels() + value_width() + (mamba ? 0 : value_heads) + decays(); }
  // Columns of a projected row that are products with rows, and not with latents.
  std::int64_t projected_from_rows() const { return decays_channels() ? channels() + value_heads : projected(); }
  std::int64_t matrix() const { return value_heads * key_dim * value_dim; }  // numbers of S
  std::int64_t state() const { return matrix() + (kernel - 1) * channels(); }

  // Channels of the convolution where q and k of one key head, and v of its value heads, begin.
  struct Channels {
    std::int64_t q, k, v;
  };
  Channels channels(std::int64_t key_head) const {
    const std::int64_t keys = key_heads * key_dim, key = key_head * key_dim,
                       value = key_head * (value_heads / key_heads) * value_dim;
    if (mamba) return {value_width() + keys + key, value_width() + key, value};
    return {key, keys + key, 2 * keys + value};
  }

  // Columns of a projected row where q and k of one key head, and v, z, b, a of its value heads, begin. Mamba-2 has no
  // b: `b` is `a`.
  struct Columns {
    std::int64_t q, k, v, z, b, a;
  };
  Columns columns(std::int64_t key_head) const {
    const std::int64_t each = value_heads / key_heads, width = each * value_dim, g = key_head;
    const std::int64_t keys = key_heads * key_dim, ends = channels() + value_width();
    if (mamba) {
      const std::int64_t v = value_width(), step = ends + g * each;
      return {2 * v + keys + g * key_dim, 2 * v + g * key_dim, v + g * width, g * width, step, step};
    }
    if (decays_channels()) {
      const std::int64_t z = channels() + value_heads;
      return {g * key_dim,   keys + g * key_dim,    2 * keys + g * width,
              z + g * width, channels() + g * each, z + value_width() + g * each * key_dim};
    }
    if (by_key_head) {
      const std::int64_t first = g * 2 * (key_dim + width), q = first + key_dim;
      return {first, q, q + key_dim, q + key_dim + width, ends + 2 * g * each, ends + (2 * g + 1) * each};
    }
    return {g * key_dim,     keys + g * key_dim,           2 * keys + g * width, channels() + g * width,
            ends + g * each, ends + value_heads + g * each};
  }
};

// A family's parameter names. "": absent. Fused names occur in files only (checkpoint/fused_names.h); here each
// parameter has its own name.
struct ParameterNames {
  const char* attention_norm = "input_layernorm";
  const char* attention_post_norm = "";
  const char* mlp_norm = "post_attention_layernorm";
  const char* mlp_post_norm = "";
  const char* final_norm = "model.norm";
  const char *gate = "mlp.gate_proj", *up = "mlp.up_proj", *down = "mlp.down_proj";
  const char* router = "mlp.gate";
  const char* correction_bias = "mlp.gate.e_score_correction_bias";
  const char* experts = "mlp.experts";  // the module of all experts; an expert has expert_gate, expert_up, expert_down
  // Files hold the experts of a layer as <experts>.gate_up_proj [E, M, 2 F], a column of gate and one of up in turn,
  // and down_proj [E, F, M], with their biases beside them (gpt-oss; checkpoint/packed_experts.h).
  bool packed_experts = false;
  const char *expert_gate = "gate_proj", *expert_up = "up_proj", *expert_down = "down_proj";
  const char *shared_gate = "mlp.shared_expert.gate_proj", *shared_up = "mlp.shared_expert.up_proj",
             *shared_down = "mlp.shared_expert.down_proj";
  const char* shared_expert_gate = "mlp.shared_expert_gate";
  const char *fused_qkv = "", *fused_gate_up = "";  // one matrix in files: q, k, v; gate, up
  const char* fused_shared = "";                    // of the shared expert: gate, up
  // Files hold the experts of a layer under these names: [E, 2 F, M], gate and then up of each expert, and [E, M, F].
  const char *stacked_gate_up = "", *stacked_down = "";
};

// The products of a layer whose weights or biases have gradients.
struct TrainedLayer {
  bool query = true, key_value = true, output = true, router = true, gate_up = true, down = true;
  bool shared_gate_up = true, shared_down = true, shared_expert_gate = true;
  bool query_latent = true, key_value_latent = true;
};

// The projections of a layer that have a LoRA adapter.
struct AdaptedLayer {
  bool query = false, key = false, value = false, output = false;
  bool query_latent = false, key_value_latent = false;
  std::array<bool, 4> projected = {};  // of the delta rule or Mamba-2, with the next three
  std::array<bool, 2> gate_latents = {}, gates = {};
  bool state_output = false;
  bool gate = false, up = false, down = false;  // of a dense MLP
  bool router = false, expert_gate_up = false, expert_down = false;
  bool shared_gate = false, shared_up = false, shared_down = false, shared_expert_gate = false;

  bool projects() const {
    return projected != std::array<bool, 4>{} || gate_latents != std::array<bool, 2>{} ||
           gates != std::array<bool, 2>{};
  }
  bool experts() const { return expert_gate_up || expert_down; }
  bool shared() const { return shared_gate || shared_up || shared_down; }
  bool operator==(const AdaptedLayer&) const = default;
};

// y = x W^T + b + s (x A^T) B^T with A [r, in], B [out, r]; s = alpha / r, or alpha / sqrt(r).
struct AdapterShape {
  std::int64_t rank = 0;  // r; 0: there are no adapters
  double alpha = 16;
  bool root_of_rank = false;           // rslora
  std::vector<AdaptedLayer> of_layer;  // one per layer
  AdaptedLayer somewhere;              // in any layer
  bool head = false;                   // the language-model head has one; of a tied head the look-up has none

  double scale() const;
};

// Which parameters train (--train, shape/trained_parameters.h); all by default. The others are held: they have no
// gradient, master or moment. A backward runs from the last layer to `first_layer`.
struct TrainedParameters {
  std::string words = "all";
  std::shared_ptr<const std::vector<bool>> of_parameter;  // in the order of for_each_parameter; null: all
  std::vector<TrainedLayer> of_layer;                     // one per layer; empty: all
  bool head = true;                                       // the matrix of the head
  std::int64_t first_layer = 0;                           // layers before it have no backward
  bool input = true;  // the embedding, or the previous stage of pp, uses the gradient of the first layer's input
  AdapterShape adapter;
  bool narrow = false;  // held matrices stay in bfloat16, even in a float32 run
  // Narrow matrices that are read from a mapped file (checkpoint/mapped_weights.h); null: none.
  std::shared_ptr<const std::vector<bool>> mapped_parameters;
  // Held matrices in NF4 (base/nf4.h), in the order of for_each_parameter; null: none.
  std::shared_ptr<const std::vector<bool>> nf4_parameters;
  bool nf4_nested = true;

  bool all() const { return of_parameter == nullptr; }
};

// The matrices that files hold in NF4, by the config.
struct StoredNf4 {
  bool any = false, nested = false;   // nested: scales are quantised too (bnb_4bit_use_double_quant)
  std::vector<std::string> left_out;  // modules that are not quantised, by the end or the beginning of their names
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
  // In layers with a window a row attends to itself and the window - 1 rows above it; in others to all rows above it.
  std::int64_t window = 0;                 // 0: no layer has a window
  std::vector<std::uint8_t> window_layer;  // one per layer, 1: it has
  // Layers with a window may have other frequencies (Gemma 3, OLMo 3).
  bool has_window_rope = false;
  Rope window_rope;
  std::vector<std::uint8_t> unrotated_layer;  // one per layer, 1: nothing rotates (SmolLM3); empty: all layers rotate
  // Empty: attention in all layers.
  std::vector<Mixer> mixer_of_layer;
  std::vector<std::uint8_t> without_mlp;  // one per layer, 1: it ends with its mixer (Nemotron-H); empty: none does
  DeltaRuleShape delta_rule;
  AttentionShape attention;
  LatentShape latent;
  NormKind norm = NormKind::rms;
  NormPlace norm_place = NormPlace::before;
  ActivationRule activation;
  Scales scales;
  RouterKind router;
  SharedExpert shared_expert;
  bool expert_bias = false;  // of gate, up and down of experts (gpt-oss)
  ParameterNames names;
  // The text part of a model with a vision tower. The tower does not run here, so rollouts must not contain the tokens
  // for images and videos, or for their begin and end.
  bool beside_vision = false;
  std::vector<std::int32_t> image_tokens;
  StoredNf4 stored_nf4;
  DType stored_dtype = DType::float32;  // the config's, then that of the weights once they are read
  TrainedParameters trained;

  bool has_experts(std::int64_t layer) const {  // in place of a dense MLP
    return !expert_layer.empty() && expert_layer[static_cast<std::size_t>(layer)] != 0;
  }
  std::int64_t expert_layers() const;  // the number of layers with experts
  // The most rows that a row of the layer sees, itself included; 0: all above it.
  std::int64_t window_of(std::int64_t layer) const { return is_window_layer(layer) ? window : 0; }
  Mixer mixer_of(std::int64_t layer) const {
    return mixer_of_layer.empty() ? Mixer::attention : mixer_of_layer[static_cast<std::size_t>(layer)];
  }
  bool has_mlp(std::int64_t layer) const {
    return without_mlp.empty() || without_mlp[static_cast<std::size_t>(layer)] == 0;
  }
  bool has_states() const { return states_in(0, layers) > 0; }
  // The number of recurrent layers in [begin, end).
  std::int64_t states_in(std::int64_t begin, std::int64_t end) const {
    std::int64_t count = 0;
    for (std::int64_t layer = begin; layer < end; ++layer) count += mixer_of(layer) != Mixer::attention;
    return count;
  }
  bool rotates(std::int64_t layer) const {
    return unrotated_layer.empty() || unrotated_layer[static_cast<std::size_t>(layer)] == 0;
  }
  // Columns that the MLP's activation reads: gate and up, or up alone.
  std::int64_t gate_up_width() const { return gate_up_width(inner); }
  std::int64_t gate_up_width(std::int64_t of_inner) const { return (activation.gated ? 2 : 1) * of_inner; }
  Rope rope() const { return {rope_theta, has_rope_scaling, rope_scaling}; }
  std::int64_t rotary_dim() const { return attention.rotary > 0 ? attention.rotary : head_dim; }
  // Whether the layer is of the kind that has the window, whatever its size.
  bool is_window_layer(std::int64_t layer) const {
    return !window_layer.empty() && window_layer[static_cast<std::size_t>(layer)] != 0;
  }
  std::int64_t parameters() const;  // tied weights once (shape/parameter_shapes.h)
  bool has_latents() const { return latent.key_value > 0; }
  std::int64_t value_dim() const { return has_latents() ? latent.value : head_dim; }  // of a head of values
  std::int64_t query_width() const { return heads * head_dim; }
  std::int64_t attended_width() const { return heads * value_dim(); }
  std::int64_t key_width() const { return kv_heads * head_dim; }
  std::int64_t value_width() const { return kv_heads * value_dim(); }
  // Columns of the product that gives keys and values.
  std::int64_t key_value_width() const {
    return has_latents() ? kv_heads * latent.heads() : key_width() + value_width();
  }
  std::int64_t head_width() const { return value_head ? 1 : vocabulary; }  // numbers a row gets from the head
};

// For ...ForConditionalGeneration, a text model with a vision tower (shape/model_families.h), the shape is the text
// model's. Errors: InputError (missing file, bad JSON, missing or absurd member, with the member's name);
// UnsupportedError for properties that are known but refused (mathematics, section 8): dropout, other architectures,
// kinds of layers, routers, rope types or quantisations, and activations other than silu, gelu, gelu_pytorch_tanh and,
// in families whose MLPs have no gate, relu2. Families with recurrent layers take silu alone, except Nemotron-H.
ModelShape read_model_shape(const std::filesystem::path& directory_or_config);
ModelShape model_shape_of(const Json& config, const std::string& where);

// A critic's shape, with value_head set. In ...ForTokenClassification and ...ForSequenceClassification with one label
// the head is stored with the weights; from ...ForCausalLM the blocks are used and the head is new. Dropout before the
// head (classifier_dropout) is not applied, as in verl. `architecture` of a language model becomes the token
// classifier's. Errors: as above; UnsupportedError for a family without a token classifier in transformers.
struct CriticShape {
  ModelShape shape;
  bool head_is_stored = false;
};
CriticShape read_critic_shape(const std::filesystem::path& directory_or_config);
CriticShape critic_shape_of(const Json& config, const std::string& where);

// A reward model's shape: as a critic's, but of a ...ForSequenceClassification with one label, whose head has no bias,
// or of the language model that training begins from. Errors: as above; InputError for a token classifier.
CriticShape read_reward_shape(const std::filesystem::path& directory_or_config);
// True for ...ForSequenceClassification: score.bias is 0, does not train and is not written.
bool scores_sequences(const ModelShape& shape);
// True where config.json names a ...ForSequenceClassification. Errors: as above for a config that cannot be read.
bool is_reward_model(const std::filesystem::path& directory_or_config);

}  // namespace espalier
