#include "espalier/mixers/kimi_delta/shape.h"

#include "espalier/shape/layer_types.h"

namespace espalier {

// Latents are whole on every rank of tp, and read by heads.
PartParameters KimiDelta::parameters(std::int64_t hidden) const {
  const RecurrenceShape& s = shape;
  constexpr bool kBias = false, kOfHeads = true;
  const Side M{hidden}, keys{s.key_heads * s.key_dim, Cut::tp}, value{s.value_width(), Cut::tp},
      heads{s.value_heads, Cut::tp}, decays{s.decays(), Cut::tp}, latent{s.gate_latent}, one{1}, kernel{s.kernel};
  PartParameters p;
  p.add({{ProductRows::all,
          {{"self_attn.q_proj", keys, M},
           {"self_attn.k_proj", keys, M},
           {"self_attn.v_proj", value, M},
           {"self_attn.b_proj", heads, M}}}});
  p.add({{ProductRows::all,
          {{"self_attn.g_a_proj", latent, M, kBias, 0, kOfHeads},
           {"self_attn.f_a_proj", latent, M, kBias, 0, kOfHeads}}}});
  p.add({{ProductRows::all, {{"self_attn.g_b_proj", value, latent}}}});
  p.add({{ProductRows::all, {{"self_attn.f_b_proj", decays, latent}}}});
  p.add({.parts = {{"self_attn.q_conv1d.weight", {keys, one, kernel}},
                   {"self_attn.k_conv1d.weight", {keys, one, kernel}},
                   {"self_attn.v_conv1d.weight", {value, one, kernel}}}});
  p.add(TensorRow{});
  p.add({.parts = {{"self_attn.A_log", {one, one, heads, one}}}});
  p.add({.parts = {{"self_attn.dt_bias", {decays}}}});
  p.add(TensorRow{});
  p.add({.parts = {{"self_attn.o_norm.weight", {{s.value_dim}}}}, .of_heads = true});
  p.add({{ProductRows::continuing, {{"self_attn.o_proj", M, value}}}});
  return p;
}

std::shared_ptr<const Mixer> KimiDelta::part(std::int64_t ranks) const {
  return std::make_shared<const KimiDelta>(part_of_shape(ranks));
}

void read_kimi_delta(const Members& config, std::vector<LayerShape>& layers) {
  constexpr std::int64_t kInterval = 4;
  RecurrenceShape s;
  s.key_heads = s.value_heads = config.integer("linear_num_heads", 1, kMostSize, 32);
  s.key_dim = s.value_dim = s.gate_latent = config.integer("linear_head_dim", 1, kMostSize, 128);
  s.kernel = config.integer("linear_conv_kernel_dim", 1, kMostKernel, 4);
  set_mixers(config, {"full_attention", "linear_attention"}, std::make_shared<const KimiDelta>(s), layers,
             [](std::int64_t layer) { return layer == 0 || layer % kInterval != 0; });
}

}  // namespace espalier
