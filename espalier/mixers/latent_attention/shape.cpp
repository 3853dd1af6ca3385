#include "espalier/mixers/latent_attention/shape.h"

#include <algorithm>

#include "espalier/base/error.h"
#include "espalier/mixers/attention/shape.h"
#include "espalier/shape/fingerprint_words.h"
#include "espalier/shape/layer_shape.h"

namespace espalier {

PartParameters LatentAttention::parameters(std::int64_t hidden) const {
  const LatentShape& s = shape;
  const Side M{hidden};
  const auto heads = [&](std::int64_t channels) { return Side{s.heads * channels, Cut::tp}; };
  constexpr bool kOfHeads = true;
  ProductShape query_latents{ProductRows::continuing}, queries{ProductRows::continuing};
  TensorRow query_norm{.of_heads = true};
  if (s.query > 0) {
    query_latents.parts = {{"self_attn.q_a_proj", {s.query}, M, s.qkv_bias, 0, kOfHeads}};
    query_norm.parts = {{"self_attn.q_a_layernorm.weight", {{s.query}}}};
    queries.parts = {{"self_attn.q_b_proj", heads(s.head_dim()), {s.query}}};
  } else {
    queries.parts = {{"self_attn.q_proj", heads(s.head_dim()), M}};
  }
  PartParameters p;
  p.add({std::move(query_latents),
         {ProductRows::all,
          {{"self_attn.kv_a_proj_with_mqa", {s.key_value + s.rotary}, M, s.qkv_bias, 0, kOfHeads}},
          s.key_value}});
  p.add(std::move(query_norm));
  p.add({.parts = {{"self_attn.kv_a_layernorm.weight", {{s.key_value}}}}, .of_heads = true});
  p.add({std::move(queries), {ProductRows::all, {{"self_attn.kv_b_proj", heads(s.plain + s.value), {s.key_value}}}}});
  p.add({{ProductRows::continuing, {{"self_attn.o_proj", M, heads(s.value), s.output_bias}}}});
  return p;
}

std::shared_ptr<const Mixer> LatentAttention::part(std::int64_t ranks) const {
  LatentShape own = shape;
  own.heads /= ranks;
  return std::make_shared<const LatentAttention>(std::move(own));
}

void LatentAttention::require(const Degrees& degrees) const { require_heads(shape.heads, shape.heads, degrees); }

Mixer::Refusal LatentAttention::refused_on_gpu(std::int64_t number_bytes) const {
  return norm_refused_on_gpu(std::max(shape.query, shape.key_value), number_bytes);
}

std::string LatentAttention::fingerprint() const {
  const auto& [heads, query, key_value, plain, rotary, value, norm_eps, scale, soft_cap, qkv_bias, output_bias, rope,
               rotates, interleaved, query_growth, growth_length] = shape;
  FingerprintWords words("latent_attention");
  for (const auto& [name, number] : {std::pair{"heads", heads},
                                     {"query_latent", query},
                                     {"key_value_latent", key_value},
                                     {"plain_channels", plain},
                                     {"rotary_channels", rotary},
                                     {"value_channels", value}})
    words.number(name, number);
  words.number("eps", norm_eps);
  words.unless(0, "scale", scale);
  words.unless(0, "cap", soft_cap);
  words.flag("qkv_bias", qkv_bias);
  words.flag("output_bias", output_bias);
  words.flag("interleaved", interleaved);
  words.add(rope, rotates ? rotary : 0);
  words.unless(0, "query_growth", query_growth);
  words.unless(0, "growth_length", growth_length);
  return std::move(words).text();
}

void LatentAttention::report(Json& json) const {
  json["heads"] = json["kv_heads"] = shape.heads, json["head_dim"] = shape.head_dim();
}

std::vector<RotaryShape> LatentAttention::rotations() const {
  const RotaryShape keys{shape.rope, shape.rotates ? shape.rotary : 0, 0, 0};
  if (shape.query_growth == 0) return {keys};
  return {keys, {shape.rope, shape.rotary, shape.query_growth, shape.growth_length}};
}

std::vector<PathKind> LatentAttention::path_kinds(bool latents) const {
  if (latents)
    return {{"latents", "gradients of latents", shape.key_value},
            {"shared keys", "gradients of shared keys", shape.rotary}};
  return {{"keys", "gradients of keys", shape.query_width(), shape.heads},
          {"values", "gradients of values", shape.value_width(), shape.heads}};
}

// Keys, values and their latents are adapted together: rows of the path are expanded by all of them.
bool LatentAttention::adapts_expansion(const ProductBits& adapted) const {
  return adapted.of_mixer(key_value_latent) || adapted.of_mixer(key_value);
}

LatentShape read_latents(const Members& config, std::int64_t heads, bool rotates) {
  constexpr std::int64_t kMost = 1 << 20, kLargestHead = 2048;
  LatentShape s;
  s.heads = heads, s.rotates = rotates;
  s.query = config.is_null("q_lora_rank") ? 0 : config.integer("q_lora_rank", 1, kMost, 1536);
  s.key_value = config.integer("kv_lora_rank", 1, kMost, 512);
  s.plain = config.integer("qk_nope_head_dim", 1, kLargestHead, 128);
  s.rotary = config.integer("qk_rope_head_dim", 2, kLargestHead, 64);
  s.value = config.integer("v_head_dim", 1, kLargestHead, 128);
  if (s.rotary % 2 != 0) config.fail("qk_rope_head_dim", "even");
  if (rotates && config.has("head_dim") && config.integer("head_dim", 1, kMost) != s.rotary)
    config.refuse("head_dim = " + shown(config.at("head_dim")), text_of("head_dim = qk_rope_head_dim = ", s.rotary));
  if (config.has("num_key_value_heads") && config.integer("num_key_value_heads", 1, 65536) != heads)
    config.fail("num_key_value_heads", text_of("num_attention_heads = ", heads));
  return s;
}

}  // namespace espalier
