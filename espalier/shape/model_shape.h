// The numbers of a model that decide cost and memory (config/model_config.h reads them). No weights, no tensors.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "espalier/base/dtype.h"
#include "espalier/base/quantised_rows.h"
#include "espalier/shape/block_kinds.h"
#include "espalier/shape/layer_shape.h"

namespace espalier {

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
  bool expert_scale = false;                // a weight is multiplied by a trained number of its expert
};

// An MLP beside the experts, which every row has; inner = 0: none.
struct SharedExpert {
  std::int64_t inner = 0;
  bool gate = false;   // its output times sigmoid(row . gate weight)
  bool apart = false;  // it, the experts and the router have norms of their own (model/apart_experts.h; Gemma 4)
};

// An input of every layer besides the stream, from a row's token and its embedding (Gemma 4 E2B and E4B); width = 0:
// there is none. It gates a product of the stream behind the layer's MLP (model/layer_inputs.h).
struct LayerInputs {
  std::int64_t width = 0;       // P, of one layer
  std::int64_t vocabulary = 0;  // rows of the table, which has L P columns
};

// How files hold the experts of a layer.
enum class ExpertFiles : std::uint8_t {
  each,         // every matrix of every expert
  stacked,      // [E, 2 F, M], gate and then up of each expert, and [E, M, F]
  interleaved,  // [E, M, 2 F], a column of gate and one of up in turn, [E, F, M], and their biases (gpt-oss)
};

// A family's parameter names. "": absent. Here every parameter has a name of its own; files may hold several of them in
// one tensor, and under other names (shape/file_names.h).
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
  const char *expert_gate = "gate_proj", *expert_up = "up_proj", *expert_down = "down_proj";
  const char *shared_gate = "mlp.shared_expert.gate_proj", *shared_up = "mlp.shared_expert.up_proj",
             *shared_down = "mlp.shared_expert.down_proj";
  const char* shared_expert_gate = "mlp.shared_expert_gate";
  // Whole names, of layers whose shared expert is apart and of RouterKind::expert_scale.
  const char *router_scale = "", *expert_scale = "", *expert_norm = "", *shared_post_norm = "", *expert_post_norm = "";
  bool linear_router = false;   // transformers has it as an nn.Linear, which peft's all-linear names
  bool beside_experts = false;  // other models of the family have experts, and peft reads names of MLPs as theirs

  // Files. One matrix is: q, k, v; gate, up; gate, up of the shared expert.
  const char *fused_qkv = "", *fused_gate_up = "", *fused_shared = "";
  // The modules of experts that are not `each`; "": <experts>.gate_up_proj and .down_proj are the tensors.
  const char *stacked_gate_up = "", *stacked_down = "";
  bool half_blocks = false;  // a layer of files is a mixer or an MLP (Nemotron-H)
  // Forms that files of one family may have; a directory's form is read from its files (config/stored_names.h).
  ExpertFiles expert_files = ExpertFiles::each;
  const char *file_root = "model.", *file_head = "lm_head";  // of the decoder's parameters; of the head
  const char* file_embedding = "embed_tokens";
  const char* output_scale = "";      // a tensor of a layer in files: LayerShape::output_scale
  bool fused_in_files_alone = false;  // q, k and v are modules of their own in transformers
  bool dense_below_experts = false;   // dense MLPs stand below the module of experts (Kimi Linear)
};

// The additions to held matrices (shape/additions.h): y = x W^T + b + s (x A^T) B^T with A [r, in], B [out, r];
// s = alpha / r, or alpha / sqrt(r).
struct Additions {
  std::int64_t rank = 0;  // r; 0: there are none
  double alpha = 16;
  bool root_of_rank = false;
  bool head = false;          // the language-model head has one; of a tied head the look-up has none
  bool layer_inputs = false;  // the product of embedded rows for layers' inputs has one

  bool exist() const { return rank > 0; }
  double scale() const;
};

// The parameters that train (--train, shape/trained_parameters.h); all by default. The others are held: they have no
// gradient, master or moment. A backward runs from the last layer to `first_layer`.
struct TrainedParameters {
  std::string words = "all";
  std::shared_ptr<const std::vector<bool>> of_parameter;  // in the order of for_each_parameter; null: all
  bool head = true;                                       // the matrix of the head
  std::int64_t first_layer = 0;                           // layers before it have no backward
  bool input = true;  // the embedding, or the previous stage of pp, uses the gradient of the first layer's input
  Additions added;
  bool narrow = false;  // held matrices stay in bfloat16, even in a float32 run
  // Narrow matrices that are read from a mapped file (checkpoint/mapped_weights.h); null: none.
  std::shared_ptr<const std::vector<bool>> mapped_parameters;
  // Held matrices in few bits (base/quantised_rows.h), in the order of for_each_parameter; null: none.
  std::shared_ptr<const std::vector<bool>> quantised_parameters;
  quantised::Form quantised_form;  // theirs

  bool all() const { return of_parameter == nullptr; }
};

// The matrices that files hold in few bits, by the config.
struct StoredQuantised {
  quantised::Form form;
  std::vector<std::string> left_out;  // modules that are not quantised, by the end or the beginning of their names
};

struct ModelShape {
  std::string architecture;     // "LlamaForCausalLM", ...
  std::int64_t hidden = 0;      // M
  std::int64_t vocabulary = 0;  // V
  std::int64_t max_positions = 0;
  double rms_norm_eps = 1e-6;
  bool tied_head = false;
  std::int64_t pad_token = -1;  // its look-ups in the embedding have no gradient (nn.Embedding's padding_idx); -1: none
  bool value_head = false;      // a critic: one number a row (score.weight [1, M], score.bias [1]), tied to nothing
  bool mlp_bias = false;        // of dense MLPs
  double initializer_range = 0.02;
  std::vector<LayerShape> layer;
  // Mixture of experts, the same in all layers that have one; experts = 0: no layer has.
  std::int64_t experts = 0, experts_per_token = 0, expert_inner = 0;
  bool norm_topk_prob = false;
  RouterKind router;
  SharedExpert shared_expert;
  bool expert_bias = false;  // of gate, up and down of experts (gpt-oss)
  NormKind norm = NormKind::rms;
  ActivationRule activation;
  Scales scales;
  LayerInputs layer_inputs;
  ParameterNames names;
  // The text part of a model with a vision tower. The tower does not run here, so rollouts must not contain the tokens
  // for images and videos, or for their begin and end.
  bool beside_vision = false;
  std::vector<std::int32_t> image_tokens;
  StoredQuantised stored_quantised;
  DType stored_dtype = DType::float32;  // the config's, then that of the weights once they are read
  TrainedParameters trained;

  std::int64_t layers() const { return static_cast<std::int64_t>(layer.size()); }  // L
  const LayerShape& at(std::int64_t number) const { return layer[static_cast<std::size_t>(number)]; }
  const Mixer& mixer(std::int64_t number) const { return *at(number).mixer; }
  bool has_experts(std::int64_t number) const { return at(number).has_experts(); }
  std::int64_t expert_layers() const { return expert_layers_before(layers()); }  // the number of layers with experts
  std::int64_t expert_layers_before(std::int64_t number) const;
  // The window of the layers that have one; 0: no layer has.
  std::int64_t window() const;
  std::int64_t states_before(std::int64_t number) const;  // numbers of states of the layers before this one
  std::int64_t states() const { return states_before(layers()); }
  std::int64_t parameters() const;                                         // tied weights once
  std::int64_t head_width() const { return value_head ? 1 : vocabulary; }  // numbers a row gets from the head
  // Columns that an MLP's activation reads: gate and up, or up alone.
  std::int64_t gate_up_width(std::int64_t of_inner) const { return (activation.gated ? 2 : 1) * of_inner; }
};

// True for ...ForSequenceClassification: score.bias is 0, does not train and is not written.
inline bool scores_sequences(const ModelShape& shape) {
  return shape.architecture.ends_with("ForSequenceClassification");
}

}  // namespace espalier
