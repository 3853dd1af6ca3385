#include "espalier/mixers/attention/shape.h"

#include <algorithm>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/parallel/degrees.h"
#include "espalier/shape/fingerprint_words.h"

namespace espalier {

PartParameters Attention::parameters(std::int64_t hidden) const {
  const AttentionShape& s = shape;
  const Side M{hidden}, queries{s.projected_width(), Cut::tp}, heads{s.query_width(), Cut::tp},
      keys{s.key_width(), Cut::tp, {}, s.kv_heads};
  const auto head_norm = [&](std::int64_t of) { return std::vector<Side>{{(s.wide_norm ? of : 1) * s.head_dim}}; };
  PartParameters p;
  ProductShape key_value{ProductRows::all};
  if (s.has_keys()) key_value.parts.push_back({"self_attn.k_proj", keys, M, s.qkv_bias});
  if (s.has_keys() && !s.keys_as_values) key_value.parts.push_back({"self_attn.v_proj", keys, M, s.qkv_bias});
  p.add({{ProductRows::continuing, {{"self_attn.q_proj", queries, M, s.qkv_bias}}}, std::move(key_value)}, s.fused_qkv,
        s.joint_qkv);
  p.add({{ProductRows::continuing, {{s.names.output, M, heads, s.output_bias}}}});
  TensorRow query_norm{.of_heads = true}, key_norm{.of_heads = true}, of_sinks;
  if (s.qk_norm) query_norm.parts = {{s.names.query_norm, head_norm(s.heads)}};
  if (s.qk_norm && s.has_keys()) key_norm.parts = {{s.names.key_norm, head_norm(s.kv_heads)}};
  if (s.sinks) of_sinks.parts = {{"self_attn.sinks", {{s.heads, Cut::tp}}}};
  p.add(std::move(query_norm));
  p.add(std::move(key_norm));
  p.add(std::move(of_sinks));
  return p;
}

std::shared_ptr<const Mixer> Attention::part(std::int64_t ranks) const {
  AttentionShape own = shape;
  own.heads /= ranks;
  own.kv_heads = std::max<std::int64_t>(1, own.kv_heads / ranks);
  return std::make_shared<const Attention>(std::move(own));
}

std::vector<LayerShape> attention_layers(std::int64_t count, AttentionShape attention, std::int64_t inner,
                                         MlpKind mlp) {
  attention.rotary = attention.head_dim;
  LayerShape layer;
  layer.mixer = std::make_shared<const Attention>(std::move(attention));
  layer.mlp = mlp, layer.inner = inner;
  return equal_layers(count, std::move(layer));
}

void require_heads(std::int64_t heads, std::int64_t kv_heads, const Degrees& d) {
  if (heads % d.tp != 0)
    throw OptionError({"--tp", text_of("a divisor of ", heads, " attention heads"), text_of(d.tp), ""});
  if (kv_heads % d.tp != 0 && d.tp % kv_heads != 0)
    throw OptionError(
        {"--tp", text_of("a divisor or a multiple of ", kv_heads, " key/value heads"), text_of(d.tp), ""});
}

void Attention::require(const Degrees& d) const {
  require_heads(shape.heads, shape.kv_heads, d);
  if (shape.qk_norm && shape.wide_norm && d.tp > 1)
    throw OptionError({"--tp", "1, because the norms of queries and keys are over all heads", text_of(d.tp), ""});
}

Mixer::Refusal norm_refused_on_gpu(std::int64_t width, std::int64_t number_bytes) {
  if (const std::int64_t most = kWidestGpuNorm / number_bytes; width > most)
    return {text_of("norms over at most ", most, " columns with sums of ", number_bytes, " bytes"), text_of(width)};
  return {};
}

Mixer::Refusal Attention::refused_on_gpu(std::int64_t number_bytes) const {
  return norm_refused_on_gpu(shape.wide_norm ? std::max(shape.query_width(), shape.key_width()) : 0, number_bytes);
}

std::string Attention::fingerprint() const {
  const auto& [heads, kv_heads, head_dim, window, scale, soft_cap, qkv_bias, output_bias, qk_norm, wide_norm, norm,
               norm_eps, value_norm, keys_as_values, source, sinks, output_gate, rope, rotary, interleaved,
               query_growth, growth_length, implied_fused_qkv, implied_joint_qkv, implied_names] = shape;
  FingerprintWords words("attention");
  words.number("heads", heads);
  words.number("kv_heads", kv_heads);
  words.number("head_dim", head_dim);
  words.unless(0, "window", window);
  words.unless(0, "scale", scale);
  words.unless(0, "cap", soft_cap);
  for (const auto& [value, name] : {std::pair{qkv_bias, "qkv_bias"},
                                    {output_bias, "output_bias"},
                                    {qk_norm, "qk_norm"},
                                    {wide_norm, "wide_norm"},
                                    {value_norm, "value_norm"},
                                    {keys_as_values, "keys_as_values"},
                                    {sinks, "sinks"},
                                    {output_gate, "output_gate"},
                                    {interleaved, "interleaved"}})
    words.flag(name, value);
  words.unless(0, "norm", static_cast<double>(norm));
  words.number("eps", norm_eps);
  words.unless(-1, "source", source);
  words.add(rope, rotary);
  words.unless(0, "query_growth", query_growth);
  words.unless(0, "growth_length", growth_length);
  return std::move(words).text();
}

void Attention::report(Json& json) const {
  json["heads"] = shape.heads, json["kv_heads"] = shape.kv_heads, json["head_dim"] = shape.head_dim;
}

std::vector<RotaryShape> Attention::rotations() const {
  const RotaryShape keys{shape.rope, shape.rotary, 0, 0};
  const RotaryShape queries{shape.rope, shape.rotary, shape.query_growth, shape.growth_length};
  if (shape.value_norm) return {keys, {}, queries};
  if (shape.query_growth == 0) return {keys};
  return {keys, queries};
}

std::vector<PathKind> Attention::path_kinds(bool) const {
  if (!shape.has_keys()) return {};
  return {{"keys", "gradients of keys", shape.key_width(), shape.kv_heads},
          {"values", "gradients of values", shape.key_width(), shape.kv_heads}};
}

}  // namespace espalier
