// config.json -> ModelShape, by the row of its family (model_families.h).
#include "espalier/shape/model_shape.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <sstream>

#include "espalier/shape/config_members.h"
#include "espalier/shape/expert_config.h"
#include "espalier/shape/model_families.h"
#include "espalier/shape/rope_config.h"
#include "espalier/shape/stored_sizes.h"
#include "espalier/shape/trained_parameters.h"
#include "espalier/shape/usual_members.h"

namespace espalier {
namespace {

constexpr const char* kLanguageModel = "ForCausalLM";
constexpr const char* kClassifier = "ForTokenClassification";
constexpr const char* kSequenceClassifier = "ForSequenceClassification";
constexpr const char* kWithVision = "ForConditionalGeneration";

struct Architecture {
  const Family& family;
  bool classifier = false;
  bool of_sequences = false;
};

Architecture architecture_of(const Members& config, bool critic) {
  std::string architecture, model_type;
  if (config.has("architectures")) {
    const Json& list = config.at("architectures");
    if (!list.is_array() || list.empty() || !list[0].is_string()) config.fail("architectures", "a list of one name");
    architecture = list[0].get<std::string>();
  } else {
    model_type = config.text("model_type", "");
    if (model_type.empty()) config.fail("architectures", "a list of one name");
  }
  std::string supported;
  for (const Family& family : model_families()) {
    const std::string name = family.name;
    if (architecture == name + kLanguageModel || (architecture.empty() && model_type == family.model_type)) {
      if (critic && !family.classifier)
        throw UnsupportedError({config.where(), text_of("a family that transformers has a ", kClassifier, " of"),
                                "'" + architecture + "'", "use another model as the critic, or as the reward model"});
      return {family};
    }
    if (critic && family.classifier && architecture == name + kClassifier) return {family, true};
    if (critic && family.classifier && architecture == name + kSequenceClassifier) return {family, true, true};
    if (!critic || family.classifier)
      supported += text_of(supported.empty() ? "" : ", ", name, critic ? kClassifier : kLanguageModel);
  }
  const std::string name = architecture.empty() ? model_type : architecture;
  const bool served = !critic && (architecture.empty() || name.ends_with(kLanguageModel));
  const char* remedy = served                                  ? kServedInPython
                       : critic && name.ends_with(kWithVision) ? "give its text model in a directory of its own"
                                                               : "";
  throw UnsupportedError({config.where(), "one of the architectures " + supported, "'" + name + "'", remedy});
}

void refuse_dropout(const Members& config, const Family& family) {
  for (const char* name :
       {"attention_dropout", "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop",
        "resid_dropout", "residual_dropout", "embd_pdrop", "embedding_dropout", "attn_pdrop", "dropout"}) {
    if (!config.has(name)) continue;
    if (!config.at(name).is_number()) config.fail(name, "a number");
    if (config.at(name).get<double>() != 0)
      config.refuse(text_of(name, " = ", shown(config.at(name))),
                    text_of("no dropout (a shared row must be the same in every rollout; set ", name, " to 0)"));
  }
  for (const char* name : {"attention_dropout", "residual_dropout"})
    if (family.dropout > 0 && !config.has(name))
      config.refuse(text_of("no ", name, ", which means ", family.dropout, " in ", family.name),
                    text_of("no dropout (a shared row must be the same in every rollout; set ", name, " to 0)"));
}

// layer_types, or nothing where it is absent: 1 for layers with a window.
std::vector<std::uint8_t> read_layer_types(const Members& config, std::int64_t layers) {
  std::vector<std::uint8_t> windowed;
  if (!config.has("layer_types")) return windowed;
  const Json& types = config.at("layer_types");
  if (!types.is_array() || types.size() != static_cast<std::size_t>(layers))
    config.fail("layer_types", text_of("a list of ", layers, " names"));
  for (const Json& type : types) {
    if (type != "sliding_attention" && type != "full_attention")
      config.refuse("layer type " + shown(type), "layers of full_attention and sliding_attention");
    windowed.push_back(type == "sliding_attention");
  }
  return windowed;
}

// Whether a layer has a window in a config without layer_types. `used`: the config has one.
bool has_window_unlisted(const Members& config, const Family& family, const ModelShape& shape, std::int64_t layer,
                         std::int64_t period, bool used) {
  constexpr std::int64_t kMaxWindowLayersAbsent = 28;  // of the configuration classes of Qwen
  const char* const member = "max_window_layers";
  switch (family.windows) {
    case Windows::by_types:
      return period == 0 || (layer + (family.full_first ? 0 : 1)) % period != 0;
    case Windows::some_if_used:
      return used && layer >= config.integer(member, 0, 1 << 20, kMaxWindowLayersAbsent);
    case Windows::some:
      return used && layer >= config.integer(member, 0, 1 << 20);
    default:
      return used && !shape.rotates(layer);
  }
}

// As the families' classes of transformers read them. A window that no rollout is longer than is none.
void read_windows(const Members& config, const Family& family, ModelShape& shape) {
  constexpr std::int64_t kLongest = 1 << 30;
  const auto layers = static_cast<std::size_t>(shape.layers);
  std::vector<std::uint8_t> windowed = read_layer_types(config, shape.layers);
  const auto windows = [&] { return std::ranges::count(windowed, 1) > 0; };
  if (family.windows == Windows::none) {
    if (windows() || config.flag("use_sliding_window", false))
      config.refuse("layers with a sliding window", text_of("layers of full attention in ", family.name));
    return;
  }
  const bool by_flag = family.windows == Windows::all_if_used || family.windows == Windows::some_if_used ||
                       family.windows == Windows::unrotated_if_used;
  const bool used = !by_flag || config.flag("use_sliding_window", false);
  const bool is_null = config.is_null("sliding_window") || (!config.has("sliding_window") && family.window == 0);
  if (family.windows == Windows::all || family.windows == Windows::all_if_used) {
    windowed.assign(layers, 1);
  } else if (windowed.empty()) {
    const std::int64_t period = config.integer("sliding_window_pattern", 1, 1 << 20, family.window_period);
    for (std::int64_t layer = 0; layer < shape.layers; ++layer)
      windowed.push_back(has_window_unlisted(config, family, shape, layer, period, used && !is_null));
  } else if (windows() && (!used || (is_null && family.windows != Windows::by_types))) {
    config.fail(used ? "sliding_window" : "use_sliding_window",
                text_of(used ? "a number of rows" : "true", " (layer_types has layers of sliding_attention)"));
  }
  if (shape.has_window_rope) shape.window_layer = windowed;  // their rotation is another, whatever the window is
  if (family.unrotated_full && !is_null)
    for (const std::uint8_t has_window : windowed) shape.unrotated_layer.push_back(has_window == 0);
  if (!used || is_null || !windows()) return;
  const std::int64_t window = config.integer("sliding_window", 1, std::int64_t{1} << 40, family.window);
  if (window > kLongest) return;
  shape.window = window;
  shape.window_layer = std::move(windowed);
}

// layer_types; where it is absent, `recurs` says which layers carry a state.
void read_mixer_types(const Members& config, ModelShape& shape, const std::function<bool(std::int64_t)>& recurs) {
  const bool named = config.has("layer_types");
  if (named && (!config.at("layer_types").is_array() ||
                config.at("layer_types").size() != static_cast<std::size_t>(shape.layers)))
    config.fail("layer_types", text_of("a list of ", shape.layers, " names"));
  for (std::int64_t layer = 0; layer < shape.layers; ++layer) {
    const Json type = named ? config.at("layer_types")[static_cast<std::size_t>(layer)]
                            : Json(recurs(layer) ? "linear_attention" : "full_attention");
    if (type != "linear_attention" && type != "full_attention")
      config.refuse("layer type " + shown(type), "layers of full_attention and linear_attention");
    shape.mixer_of_layer.push_back(type == "full_attention" ? Mixer::attention : Mixer::delta_rule);
  }
}

// layer_types, or one layer of attention after three whose rows carry a state.
void read_mixers(const Members& config, const Family& family, ModelShape& shape) {
  constexpr std::int64_t kMost = 1 << 20, kMostKernel = 32;
  DeltaRuleShape& s = shape.delta_rule;
  s.by_key_head = family.by_key_head;
  s.key_heads = config.integer("linear_num_key_heads", 1, kMost, 16);
  s.value_heads = config.integer("linear_num_value_heads", 1, kMost, 32);
  s.key_dim = config.integer("linear_key_head_dim", 1, kMost, 128);
  s.value_dim = config.integer("linear_value_head_dim", 1, kMost, 128);
  s.kernel = config.integer("linear_conv_kernel_dim", 1, kMostKernel, 4);
  if (s.value_heads % s.key_heads != 0)
    config.fail("linear_num_value_heads", text_of("a multiple of linear_num_key_heads = ", s.key_heads));
  shape.attention.output_gate = true;
  const std::int64_t interval = config.integer("full_attention_interval", 1, kMost, 4);
  read_mixer_types(config, shape, [&](std::int64_t layer) { return (layer + 1) % interval != 0; });
}

// layer_types, or all layers of attention but each fourth after the first. Latents of gates are as wide as a head.
void read_channel_decays(const Members& config, ModelShape& shape) {
  constexpr std::int64_t kMost = 1 << 20, kMostKernel = 32, kInterval = 4;
  DeltaRuleShape& s = shape.delta_rule;
  s.key_heads = s.value_heads = config.integer("linear_num_heads", 1, kMost, 32);
  s.key_dim = s.value_dim = s.gate_latent = config.integer("linear_head_dim", 1, kMost, 128);
  s.kernel = config.integer("linear_conv_kernel_dim", 1, kMostKernel, 4);
  read_mixer_types(config, shape, [](std::int64_t layer) { return layer == 0 || layer % kInterval != 0; });
}

// Mamba-2 and attention by the config's names for them: [layers] of whether a layer is Mamba-2.
std::vector<std::uint8_t> mamba_layers(const Members& config, MambaLayers by, std::int64_t layers) {
  std::vector<std::uint8_t> mamba(static_cast<std::size_t>(layers), 1);
  const char* const member = by == MambaLayers::by_types ? "layer_types" : "attn_layer_indices";
  if (!config.has(member)) return mamba;
  const Json& stated = config.at(member);
  if (!stated.is_array() || (by == MambaLayers::by_types && stated.size() != mamba.size()))
    config.fail(member, text_of("a list of ", layers, " layers"));
  for (std::size_t i = 0; i < stated.size(); ++i) {
    const Json& entry = stated[i];
    if (by == MambaLayers::by_types) {
      if (entry == "attention" || entry == "full_attention")
        mamba[i] = 0;
      else if (entry != "mamba" && entry != "linear_attention")
        config.refuse("layer type " + shown(entry), "layers of mamba and attention");
    } else {
      if (!entry.is_number_integer() || entry.get<std::int64_t>() < 0 || entry.get<std::int64_t>() >= layers)
        config.fail(member, text_of("numbers of layers below ", layers));
      mamba[entry.get<std::size_t>()] = 0;
    }
  }
  return mamba;
}

// Members of Mamba-2 layers.
struct MambaNames {
  const char *groups, *heads, *state, *kernel, *head, *conv_bias, *projection_bias;
};
constexpr MambaNames kMambaNames{"mamba_n_groups", "mamba_n_heads",   "mamba_d_state",  "mamba_d_conv",
                                 "mamba_d_head",   "mamba_conv_bias", "mamba_proj_bias"};
constexpr MambaNames kNemotronNames{"n_groups",       "mamba_num_heads", "ssm_state_size", "conv_kernel",
                                    "mamba_head_dim", "use_conv_bias",   "use_bias"};

void read_time_steps(const Members& config, DeltaRuleShape& s) {
  if (!config.has("time_step_limit")) return;
  const Json& limit = config.at("time_step_limit");
  const auto infinite = [](const Json& value) { return value == Json({{"__float__", "Infinity"}}); };
  const bool two = limit.is_array() && limit.size() == 2;
  if (!two || !limit[0].is_number() || !(infinite(limit[1]) || limit[1].is_number()))
    config.fail("time_step_limit", "two numbers");
  s.least_step = limit[0].get<double>();
  if (!infinite(limit[1])) s.largest_step = limit[1].get<double>();
}

void read_mamba(const Members& config, const Family& family, ModelShape& shape) {
  constexpr std::int64_t kMost = 1 << 20, kMostKernel = 32, kNemotronHead = 64;
  const bool nemotron = family.mamba == MambaLayers::by_pattern;
  const MambaNames& names = nemotron ? kNemotronNames : kMambaNames;
  DeltaRuleShape& s = shape.delta_rule;
  s.mamba = true;
  s.key_heads = config.integer(names.groups, 1, kMost, nemotron ? 8 : 1);
  s.value_heads = config.integer(names.heads, 1, kMost, 128);
  s.key_dim = config.integer(names.state, 1, kMost, nemotron ? 128 : 256);
  s.kernel = config.integer(names.kernel, 1, kMostKernel, 4);
  if (nemotron) {
    s.value_dim = config.integer(names.head, 1, kMost, kNemotronHead);
    // transformers' own code has this limit alone; kernels of others read time_step_limit.
    s.least_step = config.positive("time_step_min", 0.001);
    if (const std::string act = config.text("mamba_hidden_act", "silu"); act != "silu")
      config.refuse("mamba_hidden_act '" + act + "'", "mamba_hidden_act silu");
  } else {
    const std::int64_t width = config.integer("mamba_expand", 1, kMost, 2) * shape.hidden;
    const bool stated = config.has(names.head) && config.at(names.head) != Json("auto");
    s.value_dim = stated ? config.integer(names.head, 1, kMost, 1) : width / s.value_heads;
    if (s.value_heads * s.value_dim != width)
      config.fail(names.heads, text_of("heads that are together mamba_expand * hidden_size = ", width, " wide"));
    read_time_steps(config, s);
  }
  if (s.value_heads % s.key_heads != 0)
    config.fail(names.heads, text_of("a multiple of ", names.groups, " = ", s.key_heads));
  s.conv_bias = config.flag(names.conv_bias, true);
  for (const char* const name : {"mamba_proj_bias", names.projection_bias})
    if (config.flag(name, false)) config.refuse(text_of(name, " = true"), "projections without biases");
  if (nemotron) return;  // read_half_blocks has read the layers
  for (const std::uint8_t mamba : mamba_layers(config, family.mamba, shape.layers))
    shape.mixer_of_layer.push_back(mamba != 0 ? Mixer::delta_rule : Mixer::attention);
}

// The entries of a Nemotron-H model are a mixer or an MLP each. A block here is a mixer with the MLP behind it, or
// without one. Fills layers, mixers, which blocks have no MLP, and which have experts.
void read_half_blocks(const Members& config, ModelShape& shape) {
  constexpr const char *kTypes = "layers_block_type", *kPattern = "hybrid_override_pattern";
  const char* const member = config.has(kTypes) || !config.has(kPattern) ? kTypes : kPattern;
  std::vector<std::string> entries;
  if (member == kTypes) {
    if (!config.has(kTypes) || !config.at(kTypes).is_array()) config.fail(kTypes, "a list of names of layers");
    for (const Json& entry : config.at(kTypes)) entries.push_back(entry.is_string() ? entry.get<std::string>() : "");
  } else {
    for (const char letter : config.text(kPattern, "")) entries.emplace_back(1, letter);
  }
  const auto one_of = [](const std::string& entry, std::initializer_list<const char*> names) {
    return std::ranges::any_of(names, [&](const char* name) { return entry == name; });
  };
  for (const std::string& entry : entries) {
    const bool mamba = one_of(entry, {"M", "linear_attention", "mamba"}), experts = one_of(entry, {"E", "moe"});
    if (mamba || one_of(entry, {"*", "full_attention", "attention"})) {
      shape.mixer_of_layer.push_back(mamba ? Mixer::delta_rule : Mixer::attention);
      shape.without_mlp.push_back(1);
      shape.expert_layer.push_back(0);
    } else if (experts || one_of(entry, {"-", "mlp"})) {
      if (shape.without_mlp.empty() || shape.without_mlp.back() == 0)
        config.refuse(text_of("an MLP in ", member, " without a mixer right before it"),
                      "MLPs that follow Mamba-2 or attention");
      shape.without_mlp.back() = 0;
      shape.expert_layer.back() = experts ? 1 : 0;
    } else {
      config.refuse(text_of("'", entry, "' in ", member), "layers of Mamba-2, attention, MLPs and experts");
    }
  }
  shape.layers = static_cast<std::int64_t>(shape.without_mlp.size());
  if (std::ranges::count(shape.mixer_of_layer, Mixer::delta_rule) == 0) config.fail(member, "layers of Mamba-2");
}

// As the configuration classes of transformers have it: heads of queries and keys are qk_nope_head_dim and
// qk_rope_head_dim channels, every head has keys and values of its own, and head_dim is the channels that rotate.
void read_latents(const Members& config, const Family& family, ModelShape& shape) {
  constexpr std::int64_t kMost = 1 << 20, kLargestHead = 2048;
  LatentShape& s = shape.latent;
  s.query = config.is_null("q_lora_rank") ? 0 : config.integer("q_lora_rank", 1, kMost, 1536);
  s.key_value = config.integer("kv_lora_rank", 1, kMost, 512);
  s.plain = config.integer("qk_nope_head_dim", 1, kLargestHead, 128);
  s.rotary = config.integer("qk_rope_head_dim", 2, kLargestHead, 64);
  s.value = config.integer("v_head_dim", 1, kLargestHead, 128);
  if (s.rotary % 2 != 0) config.fail("qk_rope_head_dim", "even");
  if (!family.no_rotation && config.has("head_dim") && config.integer("head_dim", 1, kMost) != s.rotary)
    config.refuse("head_dim = " + shown(config.at("head_dim")), text_of("head_dim = qk_rope_head_dim = ", s.rotary));
  if (config.has("num_key_value_heads") && shape.kv_heads != shape.heads)
    config.fail("num_key_value_heads", text_of("num_attention_heads = ", shape.heads));
  shape.kv_heads = shape.heads;
  shape.head_dim = s.plain + s.rotary;
  shape.attention.rotary = s.rotary;
}

// no_rope_layers, 1 for layers that rotate; or all but each no_rope_layer_interval-th.
void read_unrotated(const Members& config, ModelShape& shape) {
  const std::int64_t interval = config.integer("no_rope_layer_interval", 1, 1 << 20, 4);
  for (std::int64_t layer = 0; layer < shape.layers; ++layer)
    shape.unrotated_layer.push_back((layer + 1) % interval == 0);
  if (!config.has("no_rope_layers")) return;
  const Json& rotates = config.at("no_rope_layers");
  const std::string expected =
      text_of("a list of ", shape.layers, " numbers, 1 for a layer that rotates and 0 for others");
  if (!rotates.is_array() || rotates.size() != static_cast<std::size_t>(shape.layers))
    config.fail("no_rope_layers", expected);
  for (std::size_t layer = 0; layer < rotates.size(); ++layer) {
    if (rotates[layer] != Json(0) && rotates[layer] != Json(1)) config.fail("no_rope_layers", expected);
    shape.unrotated_layer[layer] = rotates[layer] == Json(0);
  }
}

bool has_bias(const Members& config, Biases biases) {
  switch (biases) {
    case Biases::none:
      return false;
    case Biases::always:
      return true;
    case Biases::attention_bias:
      return config.flag("attention_bias", false);
    case Biases::attention_bias_on:
      return config.flag("attention_bias", true);
    case Biases::attention_out_bias:
      return config.flag("attention_out_bias", false);
    case Biases::use_bias:
      return config.flag("use_bias", false);
    case Biases::use_bias_on:
      return config.flag("use_bias", true);
    case Biases::qkv_bias_on:
      return config.flag("qkv_bias", true);
  }
  return false;
}

// A number above 0, or nothing: null says that there is none.
double read_cap(const Members& config, const char* name, double absent) {
  return config.is_null(name) ? 0 : config.positive(name, absent > 0 ? absent : 0);
}

void read_scales(const Members& config, const Family& family, ModelShape& shape) {
  if (family.scales_embedding) shape.scales.embedding = std::sqrt(static_cast<double>(shape.hidden));
  if (family.query_scalar > 0)
    shape.attention.scale = 1 / std::sqrt(config.positive("query_pre_attn_scalar", family.query_scalar));
  if (family.caps) {
    if (family.attention_cap == 0 && read_cap(config, "attn_logit_softcapping", 0) > 0)
      config.refuse("attn_logit_softcapping = " + shown(config.at("attn_logit_softcapping")),
                    text_of("null: transformers reads it in no layer of ", family.name));
    shape.attention.soft_cap = read_cap(config, "attn_logit_softcapping", family.attention_cap);
    shape.scales.logit_cap = read_cap(config, "final_logit_softcapping", family.logit_cap);
  }
  if (config.flag("use_bidirectional_attention", false))
    config.refuse("use_bidirectional_attention = true", "rows that do not attend to later rows");
  if (!family.multipliers) return;
  shape.scales.embedding = config.positive("embedding_multiplier", 1);
  shape.scales.residual = config.positive("residual_multiplier", 1);
  shape.scales.logits = 1 / config.positive("logits_scaling", 1);
  shape.attention.scale = config.positive("attention_multiplier", 1);
}

void read_activation(const Members& config, const Family& family, ModelShape& shape) {
  const char* member = family.activation_member;
  const std::string name = config.text(member, family.activation);
  // Their convolutions take the MLP's function, too, and are computed with silu.
  const bool convolves = family.delta_rule || family.channel_decays || family.mamba == MambaLayers::beside_indices ||
                         family.mamba == MambaLayers::by_types;
  if (convolves && name != "silu") config.refuse(text_of(member, " '", name, "'"), text_of(member, " silu"));
  shape.activation.gated = family.gated;
  if (family.experts.clamped) {
    constexpr double kSlope = 1.702;
    if (name != "silu" || config.positive("swiglu_alpha", kSlope) != kSlope)
      config.refuse(text_of(member, " '", name, "' with swiglu_alpha = ", config.positive("swiglu_alpha", kSlope)),
                    "silu with swiglu_alpha = 1.702");
    shape.activation.kind = Activation::clamped;
    shape.activation.limit = config.positive("swiglu_limit", 7);
    return;
  }
  if (name == "silu" || name == "swish")
    shape.activation.kind = Activation::silu;
  else if (name == "gelu_pytorch_tanh" || name == "gelu_new")
    shape.activation.kind = Activation::gelu_tanh;
  else if (name == "gelu" && family.gelu_is_tanh)
    shape.activation.kind = Activation::gelu_tanh;
  else if (name == "gelu")
    shape.activation.kind = Activation::gelu;
  else if (name == "relu2" && !family.gated)
    shape.activation.kind = Activation::relu_squared;
  else
    config.refuse(text_of(member, " '", name, "'"), text_of(member, " silu, gelu or gelu_pytorch_tanh"));
}

DType read_dtype(const Members& config) {
  const std::string name = config.text("dtype", config.text("torch_dtype", "float32"));
  if (name == "float64") return DType::float64;
  if (name == "bfloat16") return DType::bfloat16;
  // There is no float16 here; such weights are widened when they are read.
  if (name == "float32" || name == "float16") return DType::float32;
  config.refuse("dtype '" + name + "'", "weights in float64, float32, bfloat16 or float16");
}

void check_heads(const Members& config, const ModelShape& shape) {
  if (shape.heads % shape.kv_heads != 0)
    config.fail("num_key_value_heads", text_of("a divisor of num_attention_heads = ", shape.heads));
  if (shape.head_dim % 2 != 0) config.fail("head_dim", text_of("even (it is ", shape.head_dim, ")"));
}

// A token classifier has two labels unless its config says otherwise.
void check_one_label(const Members& config) {
  const char* expected = "one label: a critic gives one number a token";
  if (config.has("id2label")) {
    if (!config.at("id2label").is_object() || config.at("id2label").size() != 1) config.fail("id2label", expected);
  } else if (!config.has("num_labels") || config.at("num_labels") != Json(1)) {
    config.fail("num_labels", expected);
  }
}

// bitsandbytes' NF4, as transformers writes it.
StoredNf4 read_nf4(const Members& config, const Json& stated) {
  const Members members(stated, config.where(), "quantization_config.");
  if (!members.flag("load_in_4bit", false) && !members.flag("_load_in_4bit", false))
    config.refuse("quantization_config of bitsandbytes with 8 bits", "weights that are not quantised, or NF4");
  if (const std::string type = members.text("bnb_4bit_quant_type", "fp4"); type != "nf4")
    config.refuse("bnb_4bit_quant_type " + type, "weights that are not quantised, or NF4");
  if (const std::string storage = members.text("bnb_4bit_quant_storage", "uint8"); storage != "uint8")
    config.refuse("bnb_4bit_quant_storage " + storage, "NF4 stored as uint8");
  StoredNf4 out{.any = true, .nested = members.flag("bnb_4bit_use_double_quant", false), .left_out = {}};
  if (!members.has("llm_int8_skip_modules")) return out;
  const Json& names = members.at("llm_int8_skip_modules");
  const auto is_text = [](const Json& name) { return name.is_string(); };
  if (!names.is_array() || !std::ranges::all_of(names, is_text))
    members.fail("llm_int8_skip_modules", "a list of names of modules");
  out.left_out = names.get<std::vector<std::string>>();
  return out;
}

// Experts that files hold in MXFP4 are read into bfloat16 (checkpoint/packed_experts.h).
void read_quantisation(const Members& config, const Family& family, ModelShape& shape) {
  if (!config.has("quantization_config")) return;
  const Json& stated = config.at("quantization_config");
  if (stated.is_object() && stated.value("quant_method", Json()) == Json("bitsandbytes")) {
    shape.stored_nf4 = read_nf4(config, stated);
    return;
  }
  const Json method = stated.is_object() ? stated.value("quant_method", Json()) : Json();
  if (method == Json("mxfp4") && family.names.packed_experts) return;
  const std::string found = method.is_string() ? "quantization_config of method " + method.get<std::string>()
                                               : std::string("quantization_config");
  const char* const expected = family.names.packed_experts ? "weights that are not quantised, or experts in mxfp4"
                                                           : "weights that are not quantised, or bitsandbytes' NF4";
  if (method != Json("fp8")) config.refuse(found, expected);
  throw UnsupportedError({config.where(), expected, found,
                          "Widen the weights once: transformers' from_pretrained(MODEL, dtype=\"bfloat16\", "
                          "quantization_config=FineGrainedFP8Config(dequantize=True)), then save_pretrained(OUT)"});
}

ModelShape shape_of_family(const Members& stated, const Family& family) {
  const Json usual = family.channel_decays ? usual_members_of_kimi(stated) : Json();
  const Members config = family.channel_decays ? Members(usual, stated.where()) : stated;
  ModelShape shape;
  shape.architecture = text_of(family.name, kLanguageModel);
  if (family.mamba == MambaLayers::by_pattern)
    read_half_blocks(config, shape);
  else
    shape.layers = config.integer("num_hidden_layers", 1, 10000);
  shape.hidden = config.integer("hidden_size", 1, 1 << 20);
  // Without dense layers nothing is of this width.
  shape.inner = family.experts.everywhere ? config.integer(family.inner_member, 1, 1 << 24, 1)
                                          : config.integer(family.inner_member, 1, 1 << 24);
  shape.heads = family.heads > 0 ? config.integer("num_attention_heads", 1, 65536, family.heads)
                                 : config.integer("num_attention_heads", 1, 65536);
  const bool as_heads = family.kv_heads == 0 || config.is_null("num_key_value_heads");
  shape.kv_heads = config.integer("num_key_value_heads", 1, shape.heads, as_heads ? shape.heads : family.kv_heads);
  const bool of_family = family.head_dim > 0 && !config.is_null("head_dim");  // a null is hidden_size / heads
  if (!config.has("head_dim") && !family.latent && !of_family && shape.hidden % shape.heads != 0)
    config.fail("hidden_size",
                text_of("a multiple of num_attention_heads = ", shape.heads, " where head_dim is absent"));
  shape.head_dim = config.integer("head_dim", 1, 4096, of_family ? family.head_dim : shape.hidden / shape.heads);
  if (family.latent)
    read_latents(config, family, shape);
  else
    check_heads(config, shape);
  shape.vocabulary = family.vocabulary > 0 ? config.integer("vocab_size", 1, 1 << 26, family.vocabulary)
                                           : config.integer("vocab_size", 1, 1 << 26);
  shape.max_positions = config.integer("max_position_embeddings", 1, 1 << 30, family.max_positions);
  shape.rms_norm_eps = config.positive(family.eps_member, family.eps);
  shape.initializer_range = config.positive("initializer_range", 0.02);
  shape.tied_head = config.flag("tie_word_embeddings", family.tied_head);
  const std::int64_t pad = config.is_null("pad_token_id") ? -1 : family.pad_token;
  if (config.has("pad_token_id")) {
    shape.pad_token = config.integer("pad_token_id", -shape.vocabulary, shape.vocabulary - 1);
    if (shape.pad_token < 0) shape.pad_token += shape.vocabulary;  // from the end, as nn.Embedding counts
  } else if (pad >= 0) {
    shape.pad_token = pad < shape.vocabulary ? pad : -1;
  }
  shape.qkv_bias = has_bias(config, family.qkv_bias);
  shape.output_bias = has_bias(config, family.output_bias);
  shape.mlp_bias =
      (family.mlp_bias_member && config.flag("mlp_bias", false)) || (family.mlp_bias_as_output && shape.output_bias);
  shape.qk_norm = family.qk_norm_member ? config.flag("use_qk_norm", false) : family.qk_norm;
  shape.attention.wide_norm = family.wide_norm;
  shape.attention.sinks = family.sinks;
  shape.norm = family.norm;
  shape.norm_place = family.norm_place;
  shape.names = family.names;
  shape.stored_dtype = read_dtype(config);
  if (family.mamba != MambaLayers::by_pattern) shape.expert_layer.assign(shape.layers, 0);
  read_rope(config, family, shape);
  if (family.unrotated_layers) read_unrotated(config, shape);
  if (family.no_rotation || (family.position_type && config.text("position_embedding_type", "nope") != "rope"))
    shape.unrotated_layer.assign(static_cast<std::size_t>(shape.layers), 1);
  read_scales(config, family, shape);
  if (config.has("clip_qkv"))
    config.refuse("clip_qkv = " + shown(config.at("clip_qkv")), "queries, keys and values that are not clipped");
  // Qwen3-Next, Granite 4 and Nemotron-H may have no experts.
  const bool no_experts = (family.delta_rule && config.integer("num_experts", 0, 65536, 512) == 0) ||
                          (family.mamba == MambaLayers::by_pattern && shape.expert_layers() == 0) ||
                          (family.experts.may_be_none && config.integer("num_local_experts", 0, 65536, 8) == 0);
  if (family.experts.some && !no_experts) {
    read_experts(config, family, shape);
  }

  refuse_dropout(config, family);
  if (family.mamba != MambaLayers::none)
    read_mamba(config, family, shape);
  else if (family.channel_decays)
    read_channel_decays(config, shape);
  else if (family.delta_rule)
    read_mixers(config, family, shape);
  else
    read_windows(config, family, shape);
  read_activation(config, family, shape);
  read_quantisation(config, family, shape);
  return shape;
}

// What never trains is held from the start.
ModelShape with_held(ModelShape shape) {
  return shape.router.correction_bias && shape.expert_layers() > 0 ? train_only(std::move(shape), {}) : shape;
}

const Family& family_named(std::string_view name) {
  const std::span<const Family> families = model_families();
  return *std::ranges::find(families, name, [](const Family& family) { return std::string_view(family.name); });
}

// The row of a model with a vision tower, or null: the config is not such a model's.
const VisionFamily* vision_family_of(const Members& config) {
  if (!config.has("architectures") || !config.at("architectures").is_array() || config.at("architectures").empty() ||
      !config.at("architectures")[0].is_string())
    return nullptr;
  const std::string architecture = config.at("architectures")[0].get<std::string>();
  std::string type, types;
  if (config.has("text_config") && config.at("text_config").is_object())
    type = Members(config.at("text_config"), config.where(), "text_config.").text("model_type", "");
  else
    type = config.text("model_type", "");
  for (const VisionFamily& row : vision_families()) {
    if (architecture != text_of(row.name, kWithVision)) continue;
    if (type.empty() || type == row.text_type) return &row;
    types += text_of(types.empty() ? "" : " or ", row.text_type);
  }
  if (!types.empty()) config.refuse("a text model of type '" + type + "'", "a text model of type " + types);
  return nullptr;
}

// The text model's members, with those of the whole model that hold for it.
Json text_config_of(const Members& config) {
  Json text = Json::object();
  if (config.has("text_config")) {
    if (!config.at("text_config").is_object()) config.fail("text_config", "an object");
    text = config.at("text_config");
  } else {
    for (const auto& [name, value] : config.all().items())
      if (name != "vision_config") text[name] = value;
  }
  for (const char* name : {"tie_word_embeddings", "dtype", "torch_dtype", "quantization_config"})
    if (config.has(name)) text[name] = config.at(name);
  return text;
}

ModelShape shape_beside_vision(const Members& config, const VisionFamily& row) {
  const Family& family = family_named(row.family);
  Json text = text_config_of(config);
  const Json absent = Json::parse(row.absent);
  for (const auto& [name, value] : absent.items())
    if (!text.contains(name) || text.at(name).is_null()) text[name] = value;
  const Members members(text, config.where(), "text_config.");
  // Where the text model has a configuration class of its own, absent members mean other values than the family's.
  if (std::string_view(row.text_type) != family.model_type) {
    for (const char* name : {"num_key_value_heads", "max_position_embeddings", "rms_norm_eps"})
      if (!members.has(name)) members.fail(name, "a number");
    if (!members.has("rope_theta") && !members.has("rope_parameters")) members.fail("rope_theta", "a number");
  }
  ModelShape shape = shape_of_family(members, family);
  shape.architecture = text_of(row.name, kWithVision);
  shape.beside_vision = true;
  for (const char* name : {"image_token_id", "image_token_index", "video_token_id", "vision_start_token_id",
                           "vision_end_token_id", "boi_token_index", "eoi_token_index", "image_start_token_id",
                           "image_end_token_id", "video_start_token_id", "video_end_token_id"})
    if (config.has(name))
      shape.image_tokens.push_back(static_cast<std::int32_t>(config.integer(name, 0, std::int64_t{1} << 30)));
  return shape;
}

// "Qwen/Qwen3-0.6B": two words of a name and a slash between them.
bool is_name_on_hub(const std::string& text) {
  const auto plain = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_' || c == '.';
  };
  const std::size_t slash = text.find('/');
  return slash != text.npos && slash > 0 && slash + 1 < text.size() && text[0] != '.' &&
         std::all_of(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(slash), plain) &&
         std::all_of(text.begin() + static_cast<std::ptrdiff_t>(slash) + 1, text.end(), plain);
}

Json read_config(const std::filesystem::path& path) {
  std::error_code ignored;
  const std::string where = path.string();
  std::ifstream in(path, std::ios::binary);
  if (!in || std::filesystem::is_directory(path, ignored)) {
    const bool folder = path.filename() == "config.json" && std::filesystem::is_directory(path.parent_path(), ignored);
    if (folder)
      throw InputError({path.parent_path().string(), "a Hugging Face model directory",
                        "a directory without a readable config.json",
                        "Give the directory that save_pretrained or hf download wrote"});
    if (std::filesystem::exists(path, ignored))
      throw InputError(
          {where, "a Hugging Face config.json", "no readable file", "Give a model directory or its config.json"});
    throw InputError({where, "a model directory on this machine", "no such directory",
                      is_name_on_hub(where)
                          ? "If it is a model on the Hugging Face Hub, download it: hf download " + where +
                                " --local-dir " + path.filename().string() + ", and give that directory"
                          : "Check the path; a model directory holds config.json and safetensors files"});
  }
  std::ostringstream text;
  text << in.rdbuf();
  try {
    return Json::parse(text.str());
  } catch (const nlohmann::json::exception& error) {
    const std::string_view problem = error.what();  // "[json.exception.parse_error.101] parse error at line 1, ..."
    throw InputError({where, "a Hugging Face config.json",
                      text_of("no valid JSON: ", problem.substr(problem.find("] ") + 2)),
                      "Give a model directory or its config.json"});
  }
}

std::filesystem::path config_path(const std::filesystem::path& given) {
  std::error_code ignored;
  return std::filesystem::is_directory(given, ignored) ? given / "config.json" : given;
}

void check_object(const Json& json, const std::string& where) {
  if (!json.is_object()) throw InputError({where, "a JSON object", shown(json), ""});
}

}  // namespace

ModelShape model_shape_of(const Json& json, const std::string& where) {
  check_object(json, where);
  const Members config(json, where);
  if (const VisionFamily* row = vision_family_of(config)) return with_held(shape_beside_vision(config, *row));
  return with_held(shape_of_family(config, architecture_of(config, false).family));
}

CriticShape critic_shape_of(const Json& json, const std::string& where) {
  check_object(json, where);
  const Members config(json, where);
  if (!config.has("architectures")) config.fail("architectures", "a list of one name");
  const Architecture architecture = architecture_of(config, true);
  if (architecture.classifier) check_one_label(config);
  ModelShape shape = shape_of_family(config, architecture.family);
  shape.architecture = text_of(architecture.family.name, architecture.of_sequences ? kSequenceClassifier : kClassifier);
  shape.value_head = true;
  shape.tied_head = false;
  return {with_held(std::move(shape)), architecture.classifier};
}

CriticShape read_reward_shape(const std::filesystem::path& given) {
  CriticShape model = read_critic_shape(given);
  std::string& architecture = model.shape.architecture;
  if (architecture.ends_with(kSequenceClassifier)) return model;
  if (model.head_is_stored)
    throw InputError({given.string(), text_of("a model ", kLanguageModel, " or ", kSequenceClassifier),
                      "'" + architecture + "', whose head has a bias",
                      "give the language model that it began from, or a reward model"});
  architecture.replace(architecture.size() - std::string_view(kClassifier).size(), std::string::npos,
                       kSequenceClassifier);
  model.shape = with_held(std::move(model.shape));
  return model;
}

bool is_reward_model(const std::filesystem::path& given) {
  const Json config = read_config(config_path(given));
  const auto names = config.find("architectures");
  return names != config.end() && names->is_array() && names->size() == 1 && names->front().is_string() &&
         names->front().get<std::string>().ends_with(kSequenceClassifier);
}

bool scores_sequences(const ModelShape& shape) { return shape.architecture.ends_with(kSequenceClassifier); }

namespace {

// With sizes that the tensors beside it say and it does not.
Json read_completed_config(const std::filesystem::path& path) {
  Json config = read_config(path);
  add_stored_sizes(path.parent_path(), config);
  return config;
}

}  // namespace

ModelShape read_model_shape(const std::filesystem::path& given) {
  const std::filesystem::path path = config_path(given);
  return model_shape_of(read_completed_config(path), path.string());
}

CriticShape read_critic_shape(const std::filesystem::path& given) {
  const std::filesystem::path path = config_path(given);
  return critic_shape_of(read_completed_config(path), path.string());
}

std::int64_t ModelShape::expert_layers() const {
  return std::count(expert_layer.begin(), expert_layer.end(), std::uint8_t{1});
}

}  // namespace espalier
