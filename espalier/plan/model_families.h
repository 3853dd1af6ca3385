// The families of models, a row each: what a family adds to the common decoder, and the values its configuration class
// of transformers uses for absent members.
#pragma once

#include <cstdint>
#include <span>

#include "espalier/plan/model_shape.h"

namespace espalier {

// Which layers have a window of sliding_window rows.
enum class Windows : std::uint8_t {
  none,
  all,                // all; none where it is null
  all_if_used,        // all where use_sliding_window is set
  some_if_used,       // where it is set those of layer_types, or those from max_window_layers on
  unrotated_if_used,  // where it is set those of layer_types, or those without rotation
  by_types,           // those of layer_types, or all but each window_period-th; with a period of 0 all
};

// Where the biases of projections are read; an absent attention_bias is false, or on: true, as use_bias is.
enum class Biases : std::uint8_t { none, always, attention_bias, attention_bias_on, use_bias };

// Frequencies of rotary positions, in layers with a window: those of all layers, or the theta of a member of its own,
// without scaling.
struct WindowRope {
  bool own = false;
  const char* theta_member = "rope_theta";
  double theta = 10000;
};

struct Family {
  const char* name;  // architectures are name + "ForCausalLM" and, for critics, "ForTokenClassification"
  const char* model_type;
  bool classifier = true;  // transformers has the latter

  Biases qkv_bias = Biases::none, output_bias = Biases::none;
  bool mlp_bias_member = false;  // mlp_bias is read
  bool mlp_bias_as_output = false;
  bool qk_norm = false, wide_norm = false;
  bool experts = false;
  const char* expert_inner_member = "moe_intermediate_size";
  bool renormalises = false;  // the weights of a row's experts, without a member norm_topk_prob
  bool sigmoid_router = false, correction_bias = false;

  std::int64_t heads = 0, vocabulary = 0;  // of absent members; 0: they must be there
  std::int64_t head_dim = 0;               // 0: hidden / heads
  std::int64_t max_positions = 2048;
  std::int64_t kv_heads = 0;  // of an absent num_key_value_heads; 0: as many as heads
  std::int64_t pad_token = -1;
  bool tied_head = false;
  const char* eps_member = "rms_norm_eps";
  double eps = 1e-6;

  Windows windows = Windows::none;
  std::int64_t window_period = 0;
  std::int64_t window = 4096;  // of an absent sliding_window; 0: none

  double rope_theta = 10000;
  bool partial_rotary = false;  // partial_rotary_factor is read; other families rotate whole heads
  double rotary = 1;            // of an absent one
  bool interleaved = false;
  WindowRope window_rope = {};
  bool unrotated_layers = false;  // no_rope_layers is read

  NormKind norm = NormKind::rms;
  NormPlace norm_place = NormPlace::before;
  const char* activation_member = "hidden_act";
  const char* activation = "silu";
  bool gated = true;
  bool latent = false;  // latent attention (LatentShape)
  bool pairs_member =
      false;  // rope_interleave is read: neighbouring channels rotate together, which is also its absence

  bool scales_embedding = false;  // by the root of hidden_size
  double query_scalar = 0;        // of an absent query_pre_attn_scalar, to whose -1/2 scores are scaled; 0: not read
  bool multipliers = false;       // Granite's members are read
  double attention_cap = 0;       // of an absent attn_logit_softcapping
  double logit_cap = 0;           // of an absent final_logit_softcapping
  bool caps = false;              // both members are read
  // Layers of linear_attention carry a state (gated delta rule), and attention has an output gate; where a matrix is by
  // key head (DeltaRuleShape).
  bool delta_rule = false, by_key_head = false;
  ParameterNames names = {};
};

std::span<const Family> model_families();

// A model with a vision tower: architectures are name + "ForConditionalGeneration". Its text model, by the model_type
// of its text_config (or, without one, of the members beside the tower's), is that of a family.
struct VisionFamily {
  const char* name;
  const char* text_type;  // an absent model_type of text_config means it
  const char* family;     // Family::name
};

std::span<const VisionFamily> vision_families();

}  // namespace espalier
