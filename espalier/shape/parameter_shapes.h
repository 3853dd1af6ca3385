// The parameters of a model, described once: the projections and norms of its blocks, their names, sizes and sharded
// sides. Counts, tables, views, FLOPs and shards are derived from this.
//
// M width, H query heads, J key/value heads, D head size, F inner width, E experts, V vocabulary.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "espalier/shape/model_shape.h"

namespace espalier {

// The side of a parameter that is sharded over tp; `none`: every rank has the whole parameter.
enum class Cut { none, heads, kv_heads, state_heads, inner, expert_inner, shared_inner, vocabulary };

struct Side {
  std::int64_t size = 0;
  Cut cut = Cut::none;
  std::array<std::int32_t, 5> sections = {};  // sizes, end to end: a rank has a part of each; 0: no such section
};

// y = x W^T + b with W [out, in]. Its parameters are <prefix><name>.weight and <prefix><name>.bias.
struct ProjectionShape {
  const char* name = "";
  Side out, in;
  bool bias = false;
  std::int64_t rank = 0;  // of its adapter (AdapterShape): <name>.lora_A.weight, <name>.lora_B.weight; 0: none
  bool of_heads = false;  // every head reads all of its outputs
  // The module of transformers that is this projection with its neighbours: they have one A, <joint>.lora_A.weight,
  // which stands before the first of them, and a B each. "": an A of its own.
  const char* joint = "";
  bool shares_a = false;  // not the first of them

  std::int64_t low_rank() const { return rank * (out.size + (shares_a ? 0 : in.size)); }  // elements of the adapter
  std::int64_t weights() const { return out.size * in.size; }
  std::int64_t parameters() const { return weights() + (bias ? out.size : 0); }
};

struct NormShape {
  const char* name = "";
  std::int64_t width = 0;  // 0: there is none
  bool bias = false;

  std::int64_t parameters() const { return bias ? 2 * width : width; }
};

// A parameter of another form; without sides if absent.
struct TensorShape {
  const char* name = "";  // the whole name behind the layer's prefix
  std::vector<Side> sides = {};

  std::int64_t parameters() const {
    std::int64_t count = sides.empty() ? 0 : 1;
    for (const Side& side : sides) count *= side.size;
    return count;
  }
};

// Parameters of one layer. Names follow layer_prefix, names of experts expert_prefix.
struct LayerParameters {
  NormShape attention_norm;
  ProjectionShape query, key, value, output;
  // With latent attention: `query` then projects a latent's norm, and `key` one to keys and values of each head.
  ProjectionShape query_latent, key_value_latent;
  NormShape query_latent_norm, key_value_latent_norm;
  // With the delta rule, instead of query, key and value; together DeltaRuleShape::projected_from_rows() rows.
  std::array<ProjectionShape, 4> projected;
  // Where decays are of channels: the latents of z and a, and the projections of these.
  std::array<ProjectionShape, 2> gate_latents, gates;
  std::array<TensorShape, 3> conv;  // one, or of q, k and v
  TensorShape conv_bias, a_log, dt_bias, skip;
  TensorShape mixed_norm;          // over the channels of each value head; of Mamba-2 a weight for each channel
  NormShape query_norm, key_norm;  // over the channels of each head, or of all heads
  TensorShape sinks;               // a number per head
  NormShape attention_post_norm;   // of what attention adds to the stream
  NormShape mlp_norm, mlp_post_norm;
  std::int64_t experts = 0;                                                 // E; 0: the MLP is dense
  ProjectionShape router;                                                   // where there are experts
  TensorShape correction_bias;                                              // of the router's choice; never trains
  ProjectionShape gate, up, down;                                           // of the MLP, or of every expert
  ProjectionShape shared_gate, shared_up, shared_down, shared_expert_gate;  // beside the experts

  std::int64_t projected_weights() const {
    std::int64_t sum = 0;
    for (const ProjectionShape& p : projected) sum += p.weights();
    for (const ProjectionShape& p : gate_latents) sum += p.weights();
    for (const ProjectionShape& p : gates) sum += p.weights();
    return sum;
  }
  std::int64_t shared_weights() const { return shared_gate.weights() + shared_up.weights() + shared_down.weights(); }
  // Matrix elements of the MLP or of one expert.
  std::int64_t mlp_weights() const { return gate.weights() + up.weights() + down.weights(); }
  std::int64_t mlp_parameters() const { return gate.parameters() + up.parameters() + down.parameters(); }
  std::int64_t parameters() const;       // without adapters
  std::int64_t low_rank() const;         // elements of adapters, without those of experts
  std::int64_t expert_low_rank() const;  // of one expert
};

// Kimi Linear. Latents are whole on every rank of tp, and read by heads.
inline void add_channel_decays(const DeltaRuleShape& s, const Side& M, LayerParameters& p) {
  constexpr bool kBias = false, kOfHeads = true;
  const Cut cut = Cut::state_heads;
  const Side keys{s.key_heads * s.key_dim, cut}, value{s.value_width(), cut}, heads{s.value_heads, cut},
      latent{s.gate_latent}, one{1}, kernel{s.kernel};
  p.projected = {{{"self_attn.q_proj", keys, M},
                  {"self_attn.k_proj", keys, M},
                  {"self_attn.v_proj", value, M},
                  {"self_attn.b_proj", heads, M}}};
  p.gate_latents = {
      {{"self_attn.g_a_proj", latent, M, kBias, 0, kOfHeads}, {"self_attn.f_a_proj", latent, M, kBias, 0, kOfHeads}}};
  p.gates = {{{"self_attn.g_b_proj", value, latent}, {"self_attn.f_b_proj", {s.decays(), cut}, latent}}};
  p.conv = {{{"self_attn.q_conv1d.weight", {keys, one, kernel}},
             {"self_attn.k_conv1d.weight", {keys, one, kernel}},
             {"self_attn.v_conv1d.weight", {value, one, kernel}}}};
  p.a_log = {"self_attn.A_log", {one, one, heads, one}};
  p.dt_bias = {"self_attn.dt_bias", {{s.decays(), cut}}};
  p.mixed_norm = {"self_attn.o_norm.weight", {{s.value_dim}}};
  p.output = {"self_attn.o_proj", M, value};
}

inline void add_delta_rule(const DeltaRuleShape& s, const Side& M, LayerParameters& p) {
  const Cut cut = Cut::state_heads;
  const auto V = static_cast<std::int32_t>(s.value_width()), H = static_cast<std::int32_t>(s.value_heads),
             K = static_cast<std::int32_t>(s.key_heads * s.key_dim);
  const Side value{V, cut}, heads{H, cut};
  if (s.mamba) {
    const Side channels{s.channels(), cut, {V, K, K}};
    p.projected = {{{"mamba.in_proj", {s.projected(), cut, {V, V, K, K, H}}, M}}};
    p.conv[0] = {"mamba.conv1d.weight", {channels, {1}, {s.kernel}}};
    if (s.conv_bias) p.conv_bias = {"mamba.conv1d.bias", {channels}};
    p.a_log = {"mamba.A_log", {heads}};
    p.dt_bias = {"mamba.dt_bias", {heads}};
    p.skip = {"mamba.D", {heads}};
    p.mixed_norm = {"mamba.norm.weight", {value}};
    p.output = {"mamba.out_proj", M, value};
    return;
  }
  if (s.decays_channels()) return add_channel_decays(s, M, p);
  const Side channels{s.channels(), cut, {K, K, V}};
  if (s.by_key_head)
    p.projected = {{{"linear_attn.in_proj_qkvz", {s.channels() + s.value_width(), cut}, M},
                    {"linear_attn.in_proj_ba", {2 * s.value_heads, cut}, M}}};
  else
    p.projected = {{{"linear_attn.in_proj_qkv", channels, M},
                    {"linear_attn.in_proj_z", value, M},
                    {"linear_attn.in_proj_b", heads, M},
                    {"linear_attn.in_proj_a", heads, M}}};
  p.conv[0] = {"linear_attn.conv1d.weight", {channels, {1}, {s.kernel}}};
  p.a_log = {"linear_attn.A_log", {heads}};
  p.dt_bias = {"linear_attn.dt_bias", {heads}};
  p.mixed_norm = {"linear_attn.norm.weight", {{s.value_dim}}};
  p.output = {"linear_attn.out_proj", M, value};
}

inline void add_latent_attention(const ModelShape& shape, const Side& M, LayerParameters& p) {
  const LatentShape& s = shape.latent;
  const auto heads = [&](std::int64_t channels) { return Side{shape.heads * channels, Cut::heads}; };
  if (s.query > 0) {
    p.query_latent = {"self_attn.q_a_proj", {s.query}, M, shape.qkv_bias, 0, true};
    p.query_latent_norm = {"self_attn.q_a_layernorm", s.query};
    p.query = {"self_attn.q_b_proj", heads(shape.head_dim), {s.query}};
  } else {
    p.query = {"self_attn.q_proj", heads(shape.head_dim), M};
  }
  p.key_value_latent = {"self_attn.kv_a_proj_with_mqa", {s.key_value + s.rotary}, M, shape.qkv_bias, 0, true};
  p.key_value_latent_norm = {"self_attn.kv_a_layernorm", s.key_value};
  p.key = {"self_attn.kv_b_proj", heads(s.heads()), {s.key_value}};
  p.output = {"self_attn.o_proj", M, heads(s.value), shape.output_bias};
}

// Here, because the planner asks for FLOPs very often.
inline LayerParameters layer_parameters(const ModelShape& shape, bool experts, Mixer mixer = Mixer::attention,
                                        bool mlp = true) {
  const ParameterNames& names = shape.names;
  const std::int64_t width = shape.hidden, pre = shape.norm_place == NormPlace::after ? 0 : width;
  const std::int64_t post = shape.norm_place == NormPlace::before ? 0 : width;
  const bool norm_bias = shape.norm == NormKind::layer;
  const Side M{width};
  const Side heads{shape.heads * shape.head_dim, Cut::heads}, kv_heads{shape.kv_heads * shape.head_dim, Cut::kv_heads};
  const auto head_norm = [&](std::int64_t of) {
    return !shape.qk_norm ? 0 : (shape.attention.wide_norm ? of : 1) * shape.head_dim;
  };
  LayerParameters p;
  p.attention_norm = {names.attention_norm, pre, norm_bias};
  if (mixer == Mixer::delta_rule) {
    add_delta_rule(shape.delta_rule, M, p);
  } else if (shape.has_latents()) {
    add_latent_attention(shape, M, p);
  } else {
    const Side queries{(shape.attention.output_gate ? 2 : 1) * heads.size, Cut::heads};
    p.query = {"self_attn.q_proj", queries, M, shape.qkv_bias};
    p.key = {"self_attn.k_proj", kv_heads, M, shape.qkv_bias};
    p.value = {"self_attn.v_proj", kv_heads, M, shape.qkv_bias};
    p.output = {"self_attn.o_proj", M, heads, shape.output_bias};
    p.query_norm = {"self_attn.q_norm", head_norm(shape.heads)};
    p.key_norm = {"self_attn.k_norm", head_norm(shape.kv_heads)};
    if (shape.attention.sinks) p.sinks = {"self_attn.sinks", {{shape.heads, Cut::heads}}};
  }
  p.attention_post_norm = {names.attention_post_norm, post};
  if (!mlp) return p;
  p.mlp_norm = {names.mlp_norm, pre, norm_bias};
  p.mlp_post_norm = {names.mlp_post_norm, post};
  if (experts) {
    const Side inner{shape.expert_inner, Cut::expert_inner};
    p.experts = shape.experts;
    p.router = {names.router, {shape.experts}, M, shape.router.bias};
    if (shape.router.correction_bias) p.correction_bias = {names.correction_bias, {{shape.experts}}};
    const bool gated = shape.activation.gated;
    if (gated) p.gate = {names.expert_gate, inner, M, shape.expert_bias};
    p.up = {names.expert_up, inner, M, shape.expert_bias};
    p.down = {names.expert_down, M, inner, shape.expert_bias};
    const Side shared{shape.shared_expert.inner, Cut::shared_inner};
    if (gated) p.shared_gate = {names.shared_gate, shared, M};
    p.shared_up = {names.shared_up, shared, M};
    p.shared_down = {names.shared_down, M, shared};
    if (shape.shared_expert.gate) p.shared_expert_gate = {names.shared_expert_gate, {1}, M};
  } else {
    const Side inner{shape.inner, Cut::inner};
    if (shape.activation.gated) p.gate = {names.gate, inner, M, shape.mlp_bias};
    p.up = {names.up, inner, M, shape.mlp_bias};
    p.down = {names.down, M, inner, shape.mlp_bias};
  }
  return p;
}

// Calls visit(projection, whether it has an adapter) for the projections of a layer that can have one. Gate and up of
// experts are joint.
template <class Parameters, class Adapted, class Visit>
void for_each_adaptable(Parameters& p, Adapted& adapted, Visit visit) {
  visit(p.query_latent, adapted.query_latent);
  visit(p.key_value_latent, adapted.key_value_latent);
  visit(p.query, adapted.query);
  visit(p.key, adapted.key);
  visit(p.value, adapted.value);
  for (std::size_t i = 0; i < p.projected.size(); ++i) visit(p.projected[i], adapted.projected[i]);
  for (std::size_t i = 0; i < p.gate_latents.size(); ++i) visit(p.gate_latents[i], adapted.gate_latents[i]);
  for (std::size_t i = 0; i < p.gates.size(); ++i) visit(p.gates[i], adapted.gates[i]);
  visit(p.output, p.conv[0].sides.empty() ? adapted.output : adapted.state_output);
  visit(p.router, adapted.router);
  visit(p.gate, p.experts > 0 ? adapted.expert_gate_up : adapted.gate);
  visit(p.up, p.experts > 0 ? adapted.expert_gate_up : adapted.up);
  visit(p.down, p.experts > 0 ? adapted.expert_down : adapted.down);
  visit(p.shared_gate, adapted.shared_gate);
  visit(p.shared_up, adapted.shared_up);
  visit(p.shared_down, adapted.shared_down);
  visit(p.shared_expert_gate, adapted.shared_expert_gate);
}

// Whether the model can have adapters: its parameters must be modules of transformers, or parts of joined ones. Models
// whose blocks may be halves (Nemotron-H), or whose files stack the matrices of modules (Granite 4), take none.
bool takes_adapters(const ModelShape& shape);

// The parameters of a layer, with ProjectionShape::joint set where transformers joins modules. Adapters stand beside
// these modules.
LayerParameters joined_parameters(const ModelShape& shape, std::int64_t layer);
// The same with the ranks of the layer's adapters.
LayerParameters adapted_parameters(const ModelShape& shape, std::int64_t layer);

std::string layer_prefix(std::int64_t layer);  // "model.layers.3."
// The name of a module in transformers from that in files: block_sparse_moe is mlp there, and f_a_proj and f_b_proj of
// Kimi Linear are parts of forget_gate.
std::string module_name(const std::string& name);
// "model.layers.3.mlp.experts.7."
std::string expert_prefix(const ModelShape& shape, std::int64_t layer, std::int64_t expert);

// Parameters below and above the layers.
struct OuterParameters {
  ProjectionShape embedding;
  NormShape final_norm;
  ProjectionShape head;  // nothing (0 by M) where it is the embedding
};
OuterParameters outer_parameters(const ModelShape& shape);
// The head with its adapter, also where it is tied: the adapter then changes the logits alone.
ProjectionShape adapted_head(const ModelShape& shape);

// One tensor of a file.
struct ParameterShape {
  std::string name;
  std::vector<Side> sides;               // [out, in] of a matrix, [out] of a bias, [width] of a norm
  std::int64_t layer = -1, expert = -1;  // -1: of none
  bool of_heads = false;                 // read by heads: a rank with some of the heads has a part of its gradient
  std::string fused;                     // the tensor of files that it is a part of; "": its own
  bool trains = true;                    // false: the parameter is held and never changes
  bool low_rank = false;                 // of an adapter
  bool narrow = false;                   // held, in bfloat16 beside float32 (TrainedParameters::narrow)
  bool mapped = false;                   // narrow, and read in a file (TrainedParameters::mapped_parameters)
  bool nf4 = false;                      // held, in NF4 (TrainedParameters::nf4_parameters)
  bool in_parts = false;                 // where it is whole, a rank of tp has a part of its gradient
};

// weight += s b a: names of parameters. Several may have the same a.
struct AdapterPart {
  std::string a, b, weight;
  std::string module;  // of transformers: "model.layers.0.self_attn.q_proj"; "model.layers.0.mlp.experts.down_proj"
  std::int64_t layer = -1, expert = -1;
};
std::vector<AdapterPart> adapter_parts(const ModelShape& shape);

// The parameters of a table, or of a list of units. Held parameters are narrow (in memory or mapped), in NF4, or
// neither.
enum class Parameters { all, trained, held, narrow, mapped, nf4 };
inline bool belongs(const ParameterShape& parameter, Parameters which) {
  switch (which) {
    case Parameters::all:
      return true;
    case Parameters::trained:
      return parameter.trains;
    case Parameters::held:
      return !parameter.trains && !parameter.narrow && !parameter.nf4;
    case Parameters::narrow:
      return parameter.narrow && !parameter.mapped;
    case Parameters::mapped:
      return parameter.mapped;
    case Parameters::nf4:
      return parameter.nf4;
  }
  return false;
}

// Elements of trained matrices and adapters in layers: those of experts, and all others.
struct TrainedWeights {
  std::int64_t layers = 0, experts = 0;
};
TrainedWeights trained_weights(const ModelShape& shape);

// Correction biases of routers decide between experts by their last digits: files hold them as the model's own do.
inline bool keeps_its_dtype(const std::string& name) { return name.ends_with("e_score_correction_bias"); }

// True for matrices that only products and look-ups read, without adapters and routers, which are small.
bool is_read_by_products(const ModelShape& shape, const ParameterShape& p);

// In the order of the flat buffer. Matrices that one product reads together (q, k, v; gate, up) are neighbours, and
// then their biases; so are gate and up of all experts of a layer, then down of all of them, and then their biases
// likewise.
void for_each_parameter(const ModelShape& shape, const std::function<void(const ParameterShape&)>& visit);

}  // namespace espalier
