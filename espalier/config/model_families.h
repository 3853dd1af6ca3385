// The families of models, a row each: what a family adds to the common decoder, and the values its configuration class
// of transformers uses for absent members.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/mixers/attention/shape.h"
#include "espalier/shape/config_members.h"
#include "espalier/shape/model_shape.h"

namespace espalier {

// The layers that have a window of sliding_window rows.
enum class Windows : std::uint8_t {
  none,
  all,                // all; none where it is null
  all_if_used,        // all where use_sliding_window is set
  some_if_used,       // where it is set: the layers of layer_types, or layers from max_window_layers on
  some,               // the layers of layer_types, or layers from max_window_layers on; none where it is null
  unrotated_if_used,  // where it is set: the layers of layer_types, or layers without rotation
  by_types,           // the layers of layer_types, or all but each window_period-th; with a period of 0 all
};

// Where the biases of projections are read. An absent member is false; of those with _on it is true.
enum class Biases : std::uint8_t {
  none,
  always,
  attention_bias,
  attention_bias_on,
  attention_out_bias,
  use_bias,
  use_bias_on,
  qkv_bias_on,
};

// The rotary frequencies of layers with a window. `own`: from rope_parameters.sliding_attention, or without it
// from theta_member without scaling; else the same as in all layers.
struct WindowRope {
  bool own = false;
  const char* theta_member = "rope_theta";
  double theta = 10000;
};

// True if the weights of a row's experts are divided by their sum: as norm_topk_prob says, absent it is false or true;
// or always, or never.
enum class Renormalises : std::uint8_t { member, member_on, always, never };

// Gives mixers of another kind than attention to the layers that a config says have one (mixers/<kind>/shape.h).
using MixerReader = void (*)(const Members& config, std::vector<LayerShape>& layers);

// Experts and their routers.
struct Experts {
  bool some = false;  // the family has experts
  const char* inner_member = "moe_intermediate_size";
  Renormalises renormalises = Renormalises::member;
  bool sigmoid = false, correction_bias = false;
  bool wide = false;     // RouterKind::wide
  bool biases = false;   // of the router, and of gate, up and down
  bool clamped = false;  // Activation::clamped, with swiglu_limit
  // n_group, topk_group and routed_scaling_factor are read; other families have one group and no factor. If absent,
  // they are:
  bool groups = false;
  std::int64_t group_count = 1, top_groups = 1;
  double scaling = 1;
  bool group_method = false;  // topk_method is read: greedy, which it is when absent, has one group
  // The layers before first_k_dense_replace are dense, dense_layers where it is absent; else decoder_sparse_step and
  // mlp_only_layers say which are; or all layers have experts, and there is no dense MLP.
  bool dense_first = false, everywhere = false;
  bool type_list = false;    // mlp_layer_types, where it is there, says which layers are dense
  const char* none_if = "";  // where this member is 0, all layers are dense
  std::int64_t dense_layers = 1;
  // The width of the shared expert: that of shared_member, or shared_count_member times an expert's. If absent:
  const char* shared_member = "";
  const char* shared_count_member = "";
  std::int64_t shared = 0;
  bool may_share_none = false;  // the width may be 0: then there is no shared expert
  bool shared_gate = false;
  bool apart = false;  // SharedExpert::apart, and RouterKind::expert_scale
};

struct Family {
  const char* name;  // architectures are name + "ForCausalLM" and, for critics, "ForTokenClassification"
  const char* model_type;
  bool classifier = true;  // transformers has the latter

  Biases qkv_bias = Biases::none, output_bias = Biases::none;
  bool mlp_bias_member = false;  // mlp_bias is read
  bool mlp_bias_as_output = false;
  bool qk_norm = false, wide_norm = false;
  bool qk_norm_member = false;  // use_qk_norm says whether
  bool sinks = false;
  bool value_norm = false;         // AttentionShape::value_norm
  AttentionNames attention = {};   // of parameters
  std::int64_t full_head_dim = 0;  // of layers without a window, absent global_head_dim; 0: they have others' heads
  bool later_layers = false;       // members about layers that read others, and about their inputs (later_layers.h)
  Experts experts = {};

  const char* inner_member = "intermediate_size";
  std::int64_t heads = 0, vocabulary = 0;  // of absent members; 0: they must be there
  std::int64_t head_dim = 0;               // 0: hidden / heads
  std::int64_t max_positions = 2048;
  std::int64_t kv_heads = 0;  // of an absent num_key_value_heads; 0: as many as heads
  std::int64_t pad_token = -1;
  bool tied_head = false;
  double dropout = 0;  // of an absent attention_dropout or residual_dropout
  const char* eps_member = "rms_norm_eps";
  double eps = 1e-6;

  Windows windows = Windows::none;
  std::int64_t window_period = 0;
  bool full_first = false;      // of each period the first layer has no window, not the last one
  bool unrotated_full = false;  // where sliding_window is set, layers without a window do not rotate
  std::int64_t window = 4096;   // of an absent sliding_window; 0: none

  double rope_theta = 10000;
  bool partial_rotary = false;  // partial_rotary_factor is read; other families rotate whole heads
  double rotary = 1;            // of an absent one
  bool interleaved = false;
  bool query_growth = false;  // llama_4_scaling_beta is read
  bool rope_stated = false;   // members of the rotation must be there: absent they mean a scaling, not none
  WindowRope window_rope = {};
  bool unrotated_layers = false;  // no_rope_layers is read

  NormKind norm = NormKind::rms;
  NormPlace norm_place = NormPlace::before;
  const char* activation_member = "hidden_act";
  const char* activation = "silu";
  bool gelu_is_tanh = false;  // gelu means gelu_pytorch_tanh
  bool gated = true;
  bool latent = false;  // latent attention (LatentShape)
  bool pairs_member =
      false;  // rope_interleave is read: neighbouring channels rotate together, which is also its absence

  bool scales_embedding = false;  // by the root of hidden_size
  double attention_scale = 0;     // of scores, whatever the config says; 0: it says it
  double query_scalar = 0;        // of an absent query_pre_attn_scalar s: scores times 1/sqrt(s); 0: not read
  bool multipliers = false;       // Granite's members are read
  double attention_cap = 0;       // of an absent attn_logit_softcapping
  double logit_cap = 0;           // of an absent final_logit_softcapping
  bool caps = false;              // both members are read
  MixerReader mixers = nullptr;   // null: all layers are attention
  bool output_gate = false;       // AttentionShape::output_gate
  bool silu_alone = false;        // convolutions take the MLP's function, too, and are computed with silu
  // The config with members of the usual names, where the family's files have others; null: it has the usual ones.
  Json (*usual_members)(const Members& config) = nullptr;
  bool position_type = false;  // position_embedding_type is read: "rope", else no layer rotates
  bool no_rotation = false;
  ParameterNames names = {};
};

std::span<const Family> model_families();

// A model with a vision tower: architectures are name + "ForConditionalGeneration". Its text model, by the model_type
// of its text_config (or, without one, of the members beside the tower's), is that of a family.
struct VisionFamily {
  const char* name;
  const char* text_type;  // an absent model_type of text_config means it
  const char* family;     // Family::name
  // Members as JSON that hold where the text model's config is without them, if the family's values are others.
  const char* absent = "{}";
};

std::span<const VisionFamily> vision_families();

}  // namespace espalier
