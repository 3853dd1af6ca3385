// config.json -> ModelShape, by the row of its family (model_families.h).
#include "espalier/config/model_config.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <sstream>
#include <tuple>

#include "espalier/config/expert_config.h"
#include "espalier/config/fp8_config.h"
#include "espalier/config/full_layers.h"
#include "espalier/config/later_layers.h"
#include "espalier/config/reading.h"
#include "espalier/config/rope_config.h"
#include "espalier/config/stored_names.h"
#include "espalier/config/stored_scales.h"
#include "espalier/config/stored_sizes.h"
#include "espalier/config/stored_ties.h"
#include "espalier/shape/half_blocks.h"
#include "espalier/shape/trained_parameters.h"

namespace espalier {
namespace {

constexpr const char* kLanguageModel = "ForCausalLM";
constexpr const char* kClassifier = "ForTokenClassification";
constexpr const char* kSequenceClassifier = "ForSequenceClassification";
constexpr const char* kWithVision = "ForConditionalGeneration";
constexpr std::string_view kSarvam = "sarvam_";  // begins model_type

struct Architecture {
  const Family& family;
  bool classifier = false;
  bool of_sequences = false;
};

Architecture architecture_of(const Members& config, bool critic) {
  std::string architecture;
  const std::string model_type = config.text("model_type", "");
  if (config.has("architectures")) {
    const Json& list = config.at("architectures");
    if (!list.is_array() || list.empty() || !list[0].is_string()) config.fail("architectures", "a list of one name");
    architecture = list[0].get<std::string>();
  } else if (model_type.empty()) {
    config.fail("architectures", "a list of one name");
  }
  // transformers saves Sarvam's models under the names of the classes that run them.
  if (!critic && model_type.starts_with(kSarvam)) architecture.clear();
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

// True if a layer has a window in a config without layer_types. `used`: the config has one.
bool has_window_unlisted(const Members& config, const Family& family, const Reading& reading, std::int64_t layer,
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
      return used && !reading.unrotated.empty() && reading.unrotated[static_cast<std::size_t>(layer)] != 0;
  }
}

// As the families' classes of transformers read them. A window that no rollout is longer than is none.
void read_windows(const Members& config, const Family& family, Reading& reading) {
  constexpr std::int64_t kLongest = 1 << 30;
  const std::int64_t layers = reading.shape.layers();
  std::vector<std::uint8_t> windowed = read_layer_types(config, layers);
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
    windowed.assign(static_cast<std::size_t>(layers), 1);
  } else if (windowed.empty()) {
    const std::int64_t period = config.integer("sliding_window_pattern", 1, 1 << 20, family.window_period);
    for (std::int64_t layer = 0; layer < layers; ++layer)
      windowed.push_back(has_window_unlisted(config, family, reading, layer, period, used && !is_null));
  } else if (windows() && (!used || (is_null && family.windows != Windows::by_types))) {
    config.fail(used ? "sliding_window" : "use_sliding_window",
                text_of(used ? "a number of rows" : "true", " (layer_types has layers of sliding_attention)"));
  }
  if (family.window_rope.own) reading.windowed = windowed;  // their rotation is another, whatever the window is
  if (family.unrotated_full && !is_null)
    for (const std::uint8_t has_window : windowed) reading.unrotated.push_back(has_window == 0);
  if (!used || is_null || !windows()) return;
  const std::int64_t window = config.integer("sliding_window", 1, std::int64_t{1} << 40, family.window);
  if (window > kLongest) return;
  reading.window = window;
  reading.windowed = std::move(windowed);
}

// Gives layers of attention their mixers.
void set_attention(const Family& family, Reading& reading) {
  std::map<std::tuple<bool, bool, std::int64_t>, std::shared_ptr<const Mixer>> made;  // by window, rotation, source
  for (std::size_t layer = 0; layer < reading.shape.layer.size(); ++layer) {
    const bool windowed = !reading.windowed.empty() && reading.windowed[layer] != 0,
               rotates = reading.unrotated.empty() || reading.unrotated[layer] == 0;
    const std::int64_t source = reading.source.empty() ? -1 : reading.source[layer];
    std::shared_ptr<const Mixer>& mixer = made[{windowed, rotates, source}];
    if (!mixer && family.latent) {
      LatentShape latent = reading.latent;
      latent.rotates = rotates;
      mixer = std::make_shared<const LatentAttention>(std::move(latent));
    } else if (!mixer) {
      AttentionShape attention = family.full_head_dim > 0 && !windowed ? reading.full_attention : reading.attention;
      attention.window = windowed ? reading.window : 0;
      if (windowed && family.window_rope.own) attention.rope = reading.window_rope;
      if (!rotates) attention.rotary = 0;
      attention.source = source;
      mixer = std::make_shared<const Attention>(std::move(attention));
    }
    reading.shape.layer[layer].mixer = mixer;
  }
}

// no_rope_layers, 1 for layers that rotate; or all but each no_rope_layer_interval-th.
std::vector<std::uint8_t> read_unrotated(const Members& config, std::int64_t layers) {
  std::vector<std::uint8_t> unrotated;
  const std::int64_t interval = config.integer("no_rope_layer_interval", 1, 1 << 20, 4);
  for (std::int64_t layer = 0; layer < layers; ++layer) unrotated.push_back((layer + 1) % interval == 0);
  if (!config.has("no_rope_layers")) return unrotated;
  const Json& rotates = config.at("no_rope_layers");
  const std::string expected = text_of("a list of ", layers, " numbers, 1 for a layer that rotates and 0 for others");
  if (!rotates.is_array() || rotates.size() != unrotated.size()) config.fail("no_rope_layers", expected);
  for (std::size_t layer = 0; layer < rotates.size(); ++layer) {
    if (rotates[layer] != Json(0) && rotates[layer] != Json(1)) config.fail("no_rope_layers", expected);
    unrotated[layer] = rotates[layer] == Json(0);
  }
  return unrotated;
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

void read_scales(const Members& config, const Family& family, Reading& reading) {
  ModelShape& shape = reading.shape;
  AttentionShape& attention = reading.attention;
  if (family.attention_scale > 0) attention.scale = family.attention_scale;
  if (family.scales_embedding) shape.scales.embedding = std::sqrt(static_cast<double>(shape.hidden));
  if (family.query_scalar > 0)
    attention.scale = 1 / std::sqrt(config.positive("query_pre_attn_scalar", family.query_scalar));
  if (family.caps) {
    if (family.attention_cap == 0 && read_cap(config, "attn_logit_softcapping", 0) > 0)
      config.refuse("attn_logit_softcapping = " + shown(config.at("attn_logit_softcapping")),
                    text_of("null: transformers reads it in no layer of ", family.name));
    attention.soft_cap = read_cap(config, "attn_logit_softcapping", family.attention_cap);
    shape.scales.logit_cap = read_cap(config, "final_logit_softcapping", family.logit_cap);
  }
  if (config.flag("use_bidirectional_attention", false))
    config.refuse("use_bidirectional_attention = true", "rows that do not attend to later rows");
  if (!family.multipliers) return;
  shape.scales.embedding = config.positive("embedding_multiplier", 1);
  shape.scales.residual = config.positive("residual_multiplier", 1);
  shape.scales.logits = 1 / config.positive("logits_scaling", 1);
  attention.scale = config.positive("attention_multiplier", 1);
}

void read_activation(const Members& config, const Family& family, ModelShape& shape) {
  const char* member = family.activation_member;
  const std::string name = config.text(member, family.activation);
  if (family.silu_alone && name != "silu") config.refuse(text_of(member, " '", name, "'"), text_of(member, " silu"));
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

void check_heads(const Members& config, const AttentionShape& attention) {
  if (attention.heads % attention.kv_heads != 0)
    config.fail("num_key_value_heads", text_of("a divisor of num_attention_heads = ", attention.heads));
  if (attention.head_dim % 2 != 0) config.fail("head_dim", text_of("even (it is ", attention.head_dim, ")"));
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
StoredQuantised read_nf4(const Members& config, const Json& stated) {
  const Members members(stated, config.where(), "quantization_config.");
  if (!members.flag("load_in_4bit", false) && !members.flag("_load_in_4bit", false))
    config.refuse("quantization_config of bitsandbytes with 8 bits", "weights that are not quantised, or NF4");
  if (const std::string type = members.text("bnb_4bit_quant_type", "fp4"); type != "nf4")
    config.refuse("bnb_4bit_quant_type " + type, "weights that are not quantised, or NF4");
  if (const std::string storage = members.text("bnb_4bit_quant_storage", "uint8"); storage != "uint8")
    config.refuse("bnb_4bit_quant_storage " + storage, "NF4 stored as uint8");
  StoredQuantised out{{quantised::Kind::nf4, members.flag("bnb_4bit_use_double_quant", false)}, {}};
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
    shape.stored_quantised = read_nf4(config, stated);
    return;
  }
  const bool packed = family.names.expert_files == ExpertFiles::interleaved;
  if (!packed)
    if (const std::optional<StoredQuantised> fp8 = read_fp8(stated, config.where())) {
      shape.stored_quantised = *fp8;
      return;
    }
  const Json method = stated.is_object() ? stated.value("quant_method", Json()) : Json();
  if (method == Json("mxfp4") && packed) return;
  const std::string found = method.is_string() ? "quantization_config of method " + method.get<std::string>()
                                               : std::string("quantization_config");
  const char* const expected = packed ? "weights that are not quantised, or experts in mxfp4"
                                      : "weights that are not quantised, bitsandbytes' NF4, or FP8";
  if (method != Json("fp8")) config.refuse(found, expected);
  throw UnsupportedError({config.where(), expected, found,
                          "Widen the weights once: transformers' from_pretrained(MODEL, dtype=\"bfloat16\", "
                          "quantization_config=FineGrainedFP8Config(dequantize=True)), then save_pretrained(OUT)"});
}

// The layers with their MLPs; without experts a dense family's.
void read_layers(const Members& config, const Family& family, ModelShape& shape) {
  // Without dense layers nothing is of this width.
  const std::int64_t inner = family.experts.everywhere ? config.integer(family.inner_member, 1, 1 << 24, 1)
                                                       : config.integer(family.inner_member, 1, 1 << 24);
  LayerShape layer;
  layer.inner = inner, layer.norm_place = family.norm_place;
  if (!family.names.half_blocks) {
    shape.layer = equal_layers(config.integer("num_hidden_layers", 1, 10000), layer);
    return;
  }
  for (const HalfBlocks& block : read_half_blocks(config)) {
    layer.mlp = block.mlp;
    shape.layer.push_back(layer);
  }
}

// Sizes of heads, and biases and norms of projections.
void read_heads(const Members& config, const Family& family, Reading& reading) {
  AttentionShape& s = reading.attention;
  const std::int64_t hidden = reading.shape.hidden;
  s.heads = family.heads > 0 ? config.integer("num_attention_heads", 1, 65536, family.heads)
                             : config.integer("num_attention_heads", 1, 65536);
  const bool as_heads = family.kv_heads == 0 || config.is_null("num_key_value_heads");
  s.kv_heads = config.integer("num_key_value_heads", 1, s.heads, as_heads ? s.heads : family.kv_heads);
  const bool of_family = family.head_dim > 0 && !config.is_null("head_dim");  // a null is hidden_size / heads
  if (!config.has("head_dim") && !family.latent && !of_family && hidden % s.heads != 0)
    config.fail("hidden_size", text_of("a multiple of num_attention_heads = ", s.heads, " where head_dim is absent"));
  s.head_dim = config.integer("head_dim", 1, 4096, of_family ? family.head_dim : hidden / s.heads);
  if (family.latent) {
    reading.latent = read_latents(config, s.heads, !family.no_rotation);
    s.kv_heads = s.heads, s.head_dim = reading.latent.head_dim(), s.rotary = reading.latent.rotary;
  } else {
    check_heads(config, s);
    s.rotary = s.head_dim;
  }
  s.qkv_bias = has_bias(config, family.qkv_bias);
  s.output_bias = has_bias(config, family.output_bias);
  s.qk_norm = family.qk_norm_member ? config.flag("use_qk_norm", false) : family.qk_norm;
  s.wide_norm = family.wide_norm, s.sinks = family.sinks, s.output_gate = family.output_gate;
  s.norm = family.norm, s.norm_eps = reading.shape.rms_norm_eps;
  s.value_norm = family.value_norm, s.names = family.attention;
  s.fused_qkv = family.names.fused_qkv;
  if (!family.names.fused_in_files_alone) s.joint_qkv = s.fused_qkv;
}

// Members that latent attention and other attention share.
void complete_latents(Reading& reading) {
  const AttentionShape& from = reading.attention;
  LatentShape& to = reading.latent;
  to.scale = from.scale, to.soft_cap = from.soft_cap;
  to.qkv_bias = from.qkv_bias, to.output_bias = from.output_bias;
  to.rope = from.rope, to.interleaved = from.interleaved;
  to.query_growth = from.query_growth, to.growth_length = from.growth_length;
}

ModelShape shape_of_family(const Members& stated, const Family& family) {
  const Json usual = family.usual_members ? family.usual_members(stated) : Json();
  const Members config = family.usual_members ? Members(usual, stated.where()) : stated;
  Reading reading;
  ModelShape& shape = reading.shape;
  shape.architecture = text_of(family.name, kLanguageModel);
  shape.hidden = config.integer("hidden_size", 1, 1 << 20);
  read_layers(config, family, shape);
  shape.rms_norm_eps = config.positive(family.eps_member, family.eps);
  read_heads(config, family, reading);
  shape.vocabulary = family.vocabulary > 0 ? config.integer("vocab_size", 1, 1 << 26, family.vocabulary)
                                           : config.integer("vocab_size", 1, 1 << 26);
  shape.max_positions = config.integer("max_position_embeddings", 1, 1 << 30, family.max_positions);
  shape.initializer_range = config.positive("initializer_range", 0.02);
  shape.tied_head = config.flag("tie_word_embeddings", family.tied_head);
  const std::int64_t pad = config.is_null("pad_token_id") ? -1 : family.pad_token;
  if (config.has("pad_token_id")) {
    shape.pad_token = config.integer("pad_token_id", -shape.vocabulary, shape.vocabulary - 1);
    if (shape.pad_token < 0) shape.pad_token += shape.vocabulary;  // from the end, as nn.Embedding counts
  } else if (pad >= 0) {
    shape.pad_token = pad < shape.vocabulary ? pad : -1;
  }
  shape.mlp_bias = (family.mlp_bias_member && config.flag("mlp_bias", false)) ||
                   (family.mlp_bias_as_output && reading.attention.output_bias);
  shape.norm = family.norm;
  shape.names = family.names;
  shape.names.beside_experts = family.experts.some || family.mixers != nullptr || family.latent;
  shape.stored_dtype = read_dtype(config);
  read_rope(config, family, reading);
  if (family.unrotated_layers) reading.unrotated = read_unrotated(config, shape.layers());
  if (family.no_rotation || (family.position_type && config.text("position_embedding_type", "nope") != "rope"))
    reading.unrotated.assign(shape.layer.size(), 1);
  read_scales(config, family, reading);
  if (config.has("clip_qkv"))
    config.refuse("clip_qkv = " + shown(config.at("clip_qkv")), "queries, keys and values that are not clipped");
  const char* const none_if = family.experts.none_if;
  const bool no_experts = (none_if[0] != '\0' && config.integer(none_if, 0, 65536, 1) == 0) ||
                          (family.names.half_blocks && shape.expert_layers() == 0);
  if (family.experts.some && !no_experts) read_experts(config, family, reading);

  refuse_dropout(config, family);
  if (family.mixers == nullptr) read_windows(config, family, reading);
  if (family.latent) complete_latents(reading);
  if (family.full_head_dim > 0) read_full_layers(config, family, reading);
  if (family.later_layers) read_later_layers(config, reading);
  set_attention(family, reading);
  if (family.mixers != nullptr) family.mixers(config, shape.layer);
  read_activation(config, family, shape);
  read_quantisation(config, family, shape);
  return std::move(reading.shape);
}

// Parameters that never train are held from the start.
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

// The text model's members, with members of the whole model that hold for it.
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
                           "image_end_token_id", "video_start_token_id", "video_end_token_id", "boi_token_id",
                           "eoi_token_id", "audio_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index"})
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

namespace {

// With sizes that the tensors beside it say and it does not, and without a tie that they contradict.
Json read_completed_config(const std::filesystem::path& path) {
  Json config = read_config(path);
  add_stored_sizes(path.parent_path(), config);
  untie_differing_head(path.parent_path(), config);
  return config;
}

}  // namespace

ModelShape read_model_shape(const std::filesystem::path& given) {
  const std::filesystem::path path = config_path(given);
  ModelShape shape = model_shape_of(read_completed_config(path), path.string());
  set_stored_names(path.parent_path(), shape);
  set_stored_scales(path.parent_path(), shape);
  return shape;
}

bool config_ties_head(const std::filesystem::path& given) {
  const std::filesystem::path path = config_path(given);
  return model_shape_of(read_config(path), path.string()).tied_head;
}

CriticShape read_critic_shape(const std::filesystem::path& given) {
  const std::filesystem::path path = config_path(given);
  CriticShape critic = critic_shape_of(read_completed_config(path), path.string());
  set_stored_names(path.parent_path(), critic.shape);
  set_stored_scales(path.parent_path(), critic.shape);
  return critic;
}

ModelShape read_trained_shape(const std::filesystem::path& directory, const TrainedChoice& choice) {
  return train_only(choice.scores ? read_reward_shape(directory).shape : read_model_shape(directory), choice);
}

ModelShape read_trained_critic_shape(const std::filesystem::path& directory, const TrainedChoice& choice) {
  return train_only(read_critic_shape(directory).shape, choice);
}

}  // namespace espalier
