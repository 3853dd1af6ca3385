// Each structure is taken apart into all of its members. A new member therefore does not compile until it is written
// here, or its name begins with `implied` or `ignored`: implied by the architecture's name, or without influence on
// what weights mean.
#include "espalier/shape/fingerprint.h"

#include <sstream>
#include <utility>
#include <vector>

namespace espalier {
namespace {

class Words {
 public:
  Words() { out_.precision(17); }

  void text(const std::string& value) { out_ << value; }
  template <class Number>
  void always(const char* name, Number value) {
    out_ << " " << name << "=" << value;
  }
  // Written where the value is not the one of most models.
  void unless(double usual, const char* name, double value) {
    if (value != usual) always(name, value);
  }
  void flag(const char* name, bool value) {
    if (value) out_ << " " << name;
  }
  template <class Kind>
  void layers(const char* name, const std::vector<Kind>& of_layer) {
    if (of_layer.empty()) return;
    out_ << " " << name << "=";
    for (const Kind one : of_layer) out_ << (one != Kind{} ? '1' : '0');
  }
  void scaling(const char* name, const RopeScaling& s);
  std::string str() && { return std::move(out_).str(); }

 private:
  std::ostringstream out_;
};

void Words::scaling(const char* name, const RopeScaling& s) {
  const auto& [factor, low, high, original, type, attention_factor, beta_fast, beta_slow, truncate, short_factor,
               long_factor] = s;
  out_ << " " << name << "=" << factor << "," << low << "," << high << "," << original;
  if (type == RopeType::llama3) return;
  out_ << ",type" << static_cast<int>(type) << "," << attention_factor << "," << beta_fast << "," << beta_slow << ","
       << truncate;
  for (const double one : short_factor) out_ << "," << one;
  if (!long_factor.empty()) out_ << ",long";
  for (const double one : long_factor) out_ << "," << one;
}

void append(Words& words, const AttentionShape& attention) {
  const auto& [scale, soft_cap, rotary, interleaved, wide_norm, sinks, implied_output_gate, query_growth,
               growth_length] = attention;
  words.unless(0, "attention_scale", scale);
  words.unless(0, "attention_cap", soft_cap);
  words.unless(0, "rotary", static_cast<double>(rotary));
  words.unless(0, "query_growth", query_growth);
  words.unless(0, "growth_length", static_cast<double>(growth_length));
  words.unless(0, "interleaved", interleaved);
  words.unless(0, "wide_norm", wide_norm);
  words.unless(0, "sinks", sinks);
}

void append(Words& words, const DeltaRuleShape& states) {
  const auto& [key_heads, value_heads, key_dim, value_dim, kernel, implied_by_key_head, implied_mamba, conv_bias,
               least_step, largest_step, gate_latent] = states;
  for (const auto& [name, value] : {std::pair{"state_key_heads", key_heads},
                                    {"state_value_heads", value_heads},
                                    {"state_key_dim", key_dim},
                                    {"state_value_dim", value_dim},
                                    {"state_kernel", kernel},
                                    {"gate_latent", gate_latent}})
    words.unless(0, name, static_cast<double>(value));
  words.flag("conv_bias", conv_bias);
  words.unless(0, "least_step", least_step);
  words.unless(DeltaRuleShape{}.largest_step, "largest_step", largest_step);
}

void append(Words& words, const LatentShape& latent) {
  const auto& [query, key_value, plain, rotary, value, norm_eps] = latent;
  for (const auto& [name, width] : {std::pair{"query_latent", query},
                                    {"key_value_latent", key_value},
                                    {"plain_channels", plain},
                                    {"rotary_channels", rotary},
                                    {"value_channels", value}})
    words.unless(0, name, static_cast<double>(width));
  words.unless(LatentShape{}.norm_eps, "latent_eps", norm_eps);
}

void append(Words& words, const Scales& scales) {
  const auto& [embedding, residual, logits, logit_cap] = scales;
  words.unless(1, "embedding_scale", embedding);
  words.unless(1, "residual_scale", residual);
  words.unless(1, "logits_scale", logits);
  words.unless(0, "logit_cap", logit_cap);
}

void append(Words& words, const RouterKind& router) {
  const auto& [sigmoid, implied_correction, implied_after_choice, implied_bias, implied_wide, groups, top_groups,
               scaling] = router;
  words.unless(0, "router_sigmoid", sigmoid);
  words.unless(1, "router_groups", static_cast<double>(groups));
  words.unless(1, "router_top_groups", static_cast<double>(top_groups));
  words.unless(1, "router_scaling", scaling);
}

void append(Words& words, const ActivationRule& activation) {
  const auto& [kind, limit, gated] = activation;
  words.unless(0, "activation", static_cast<int>(kind));
  words.unless(1, "gated", gated);
  words.unless(0, "activation_limit", limit);
}

void append(Words& words, const SharedExpert& shared) {
  const auto& [inner, gate] = shared;
  words.unless(0, "shared_inner", static_cast<double>(inner));
  words.unless(0, "shared_gate", gate);
}

}  // namespace

std::string fingerprint_of(const ModelShape& shape) {
  const auto& [architecture, layers, hidden, inner, heads, kv_heads, head_dim, vocabulary, ignored_max_positions, eps,
               rope_theta, has_rope_scaling, rope_scaling, tied_head, pad_token, value_head, qkv_bias, output_bias,
               mlp_bias, qk_norm, ignored_initializer_range, experts, per_token, expert_inner, norm_topk, expert_layer,
               window, window_layer, has_window_rope, window_rope, unrotated_layer, mixer_of_layer, without_mlp,
               delta_rule, attention, latent, norm, norm_place, activation, scales, router, shared_expert, expert_bias,
               implied_names, implied_beside_vision, ignored_image_tokens, ignored_stored_nf4, ignored_stored_dtype,
               trained] = shape;
  Words words;
  words.text(architecture);
  for (const auto& [name, value] : {std::pair{"layers", layers},
                                    {"hidden", hidden},
                                    {"inner", inner},
                                    {"heads", heads},
                                    {"kv_heads", kv_heads},
                                    {"head_dim", head_dim},
                                    {"vocabulary", vocabulary}})
    words.always(name, value);
  words.always("eps", eps);
  words.always("rope_theta", rope_theta);
  if (has_rope_scaling) words.scaling("rope_scaling", rope_scaling);
  words.unless(-1, "pad_token", static_cast<double>(pad_token));
  for (const auto& [value, name] : {std::pair{tied_head, "tied_head"},
                                    {value_head, "value_head"},
                                    {qkv_bias, "qkv_bias"},
                                    {output_bias, "output_bias"},
                                    {mlp_bias, "mlp_bias"},
                                    {qk_norm, "qk_norm"}})
    words.flag(name, value);
  if (experts > 0) {
    words.always("experts", experts);
    words.always("per_token", per_token);
    words.always("expert_inner", expert_inner);
    words.always("norm_topk", norm_topk);
    words.layers("expert_layers", expert_layer);
  }
  if (window > 0) {
    words.always("window", window);
    words.layers("window_layers", window_layer);
  }
  if (has_window_rope) {
    words.layers("window_rope_layers", window_layer);
    const auto& [theta, has_scaling, scaling] = window_rope;
    words.always("window_rope_theta", theta);
    if (has_scaling) words.scaling("window_rope_scaling", scaling);
  }
  words.layers("unrotated_layers", unrotated_layer);
  words.layers("state_layers", mixer_of_layer);
  words.layers("without_mlp", without_mlp);
  append(words, attention);
  words.unless(0, "norm", static_cast<int>(norm));
  words.unless(0, "norm_place", static_cast<int>(norm_place));
  append(words, activation);
  append(words, delta_rule);
  words.unless(0, "expert_bias", expert_bias);
  append(words, scales);
  append(words, router);
  append(words, shared_expert);
  append(words, latent);
  words.flag("weights=nf4", trained.nf4_parameters != nullptr);
  if (!trained.all()) words.text(std::string(kFingerprintTrain) + trained.words);
  return std::move(words).str();
}

}  // namespace espalier
