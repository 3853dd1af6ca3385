// config.json -> ModelShape: one table of families, one reader of checked members, one list of refusals.
#include "espalier/plan/model_shape.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>

#include "espalier/base/error.h"
#include "espalier/base/json.h"

namespace espalier {
namespace {

// Which layers have a window of sliding_window rows: none; all; all where use_sliding_window is set; where it is set
// those that layer_types names, or those from max_window_layers on.
enum class Windows { none, all, all_if_used, some_if_used };

// What a family adds to the common decoder, and the values its configuration class uses for absent members.
struct Family {
  const char* name;  // architectures are name + kLanguageModel or kClassifier
  const char* model_type;
  bool qkv_bias;         // always, whatever attention_bias says
  bool bias_members;     // attention_bias is read
  bool mlp_bias_member;  // mlp_bias is read
  bool qk_norm;
  bool experts;
  std::int64_t head_dim;  // 0: hidden / heads
  std::int64_t max_positions;
  std::int64_t kv_heads = 0;  // of an absent num_key_value_heads; 0: as many as heads
  Windows windows = Windows::none;
};
// What the program refuses may be a model that its own transformers code runs.
constexpr const char* kServedInPython =
    "espalier.hf and espalier.trl share prompts around transformers' own code, for most causal models; "
    "espalier.hf.check(model) says whether for this one (docs/python.md)";
constexpr const char* kLanguageModel = "ForCausalLM";
constexpr const char* kClassifier = "ForTokenClassification";
constexpr Family kFamilies[] = {
    {"Llama", "llama", false, true, true, false, false, 0, 2048},
    {"Mistral", "mistral", false, false, false, false, false, 0, 131072, 8, Windows::all},
    {"Qwen2", "qwen2", true, false, false, false, false, 0, 32768, 0, Windows::some_if_used},
    {"Qwen3", "qwen3", false, true, false, true, false, 128, 32768, 0, Windows::some_if_used},
    {"Qwen3Moe", "qwen3_moe", false, true, false, true, true, 128, 32768, 0, Windows::all_if_used},
};

std::string shown(const Json& value) {
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  return text.size() > 60 ? text.substr(0, 57) + "..." : text;
}

// Members of one JSON object, checked as they are read; `where` and the member's name go into every error.
class Members {
 public:
  Members(const Json& object, std::string where, std::string path = "")
      : object_(object), where_(std::move(where)), path_(std::move(path)) {}

  bool is_null(const char* name) const { return object_.contains(name) && object_.at(name).is_null(); }
  bool has(const char* name) const { return object_.contains(name) && !object_.at(name).is_null(); }
  const Json& at(const char* name) const { return object_.at(name); }

  [[noreturn]] void fail(const char* name, const std::string& expected) const {
    throw InputError({where_, text_of("member '", path_, name, "' to be ", expected),
                      object_.contains(name) ? shown(object_.at(name)) : std::string("nothing"), ""});
  }
  [[noreturn]] void refuse(const std::string& got, const std::string& supported) const {
    throw UnsupportedError({where_, supported, got, kServedInPython});
  }

  std::int64_t integer(const char* name, std::int64_t low, std::int64_t high) const {
    const std::string expected = text_of("an integer in [", low, ", ", high, "]");
    if (!has(name)) fail(name, expected);
    const Json& value = at(name);
    if (!value.is_number()) fail(name, expected);
    // Through double: exact for everything in range, and no overflow for what is not.
    const double number = value.get<double>();
    if (!(number >= static_cast<double>(low) && number <= static_cast<double>(high)) || number != std::floor(number))
      fail(name, expected);
    return static_cast<std::int64_t>(number);
  }
  std::int64_t integer(const char* name, std::int64_t low, std::int64_t high, std::int64_t absent) const {
    return has(name) ? integer(name, low, high) : absent;
  }
  double positive(const char* name, double absent) const {
    if (!has(name)) return absent;
    const double value = at(name).is_number() ? at(name).get<double>() : 0;
    if (!(value > 0) || !std::isfinite(value)) fail(name, "a number above 0");
    return value;
  }
  bool flag(const char* name, bool absent) const {
    if (!has(name)) return absent;
    if (!at(name).is_boolean()) fail(name, "true or false");
    return at(name).get<bool>();
  }
  std::string text(const char* name, const std::string& absent) const {
    if (!has(name)) return absent;
    if (!at(name).is_string()) fail(name, "a string");
    return at(name).get<std::string>();
  }
  const std::string& where() const { return where_; }

 private:
  const Json& object_;
  std::string where_, path_;
};

struct Architecture {
  const Family& family;
  bool classifier = false;
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
  for (const Family& family : kFamilies) {
    const std::string name = family.name;
    if (architecture == name + kLanguageModel || (architecture.empty() && model_type == family.model_type))
      return {family};
    if (critic && architecture == name + kClassifier) return {family, true};
    supported += text_of(supported.empty() ? "" : ", ", name, critic ? kClassifier : kLanguageModel);
  }
  const std::string name = architecture.empty() ? model_type : architecture;
  const bool served = !critic && (architecture.empty() || name.ends_with(kLanguageModel));
  throw UnsupportedError(
      {config.where(), "one of the architectures " + supported, "'" + name + "'", served ? kServedInPython : ""});
}

void refuse_dropout(const Members& config) {
  for (const char* name :
       {"attention_dropout", "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop",
        "resid_dropout", "embd_pdrop", "embedding_dropout", "attn_pdrop", "dropout"}) {
    if (!config.has(name)) continue;
    if (!config.at(name).is_number()) config.fail(name, "a number");
    if (config.at(name).get<double>() != 0)
      config.refuse(text_of(name, " = ", shown(config.at(name))),
                    text_of("no dropout (a shared row must be the same in every rollout; set ", name, " to 0)"));
  }
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

// As the families' classes of transformers read them. A window that no rollout is longer than is none.
void read_windows(const Members& config, const Family& family, ModelShape& shape) {
  constexpr std::int64_t kAbsent = 4096, kMaxWindowLayersAbsent = 28;  // of the configuration classes
  constexpr std::int64_t kLongest = 1 << 30;
  const auto layers = static_cast<std::size_t>(shape.layers);
  std::vector<std::uint8_t> windowed = read_layer_types(config, shape.layers);
  if (family.windows == Windows::none) {
    if (std::ranges::count(windowed, 1) > 0 || config.flag("use_sliding_window", false))
      config.refuse("layers with a sliding window", text_of("layers of full attention in ", family.name));
    return;
  }
  if (family.windows == Windows::all || family.windows == Windows::all_if_used) windowed.assign(layers, 1);
  const bool used = family.windows == Windows::all || config.flag("use_sliding_window", false);
  const bool is_null = config.is_null("sliding_window");
  if (family.windows == Windows::some_if_used && windowed.empty()) {
    const std::int64_t first = config.integer("max_window_layers", 0, 1 << 20, kMaxWindowLayersAbsent);
    for (std::int64_t layer = 0; layer < shape.layers; ++layer) windowed.push_back(used && layer >= first);
  } else if (family.windows == Windows::some_if_used && std::ranges::count(windowed, 1) > 0 && (!used || is_null)) {
    config.fail(used ? "sliding_window" : "use_sliding_window",
                text_of(used ? "a number of rows" : "true", " (layer_types has layers of sliding_attention)"));
  }
  if (!used || is_null || std::ranges::count(windowed, 1) == 0) return;
  const std::int64_t window = config.integer("sliding_window", 1, std::int64_t{1} << 40, kAbsent);
  if (window > kLongest) return;
  shape.window = window;
  shape.window_layer = std::move(windowed);
}

void read_rope(const Members& config, ModelShape& shape) {
  shape.rope_theta = config.positive("rope_theta", 10000);
  if (config.positive("partial_rotary_factor", 1) != 1)
    config.refuse("partial_rotary_factor = " + shown(config.at("partial_rotary_factor")), "rotation of whole heads");
  const char* holder = config.has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  if (!config.has(holder)) return;
  const Json* rope = &config.at(holder);
  if (!rope->is_object()) config.fail(holder, "an object or null");
  // Recent configurations may keep one object per layer type.
  if (rope->contains("full_attention") && rope->at("full_attention").is_object()) rope = &rope->at("full_attention");
  const Members members(*rope, config.where(), text_of(holder, "."));
  shape.rope_theta = members.positive("rope_theta", shape.rope_theta);
  if (members.positive("partial_rotary_factor", 1) != 1)
    members.refuse("partial_rotary_factor = " + shown(members.at("partial_rotary_factor")), "rotation of whole heads");
  const std::string type = members.text("rope_type", members.text("type", "default"));
  if (type == "default") return;
  if (type != "llama3") members.refuse("rope_type '" + type + "'", "rope_type default or llama3");
  for (const char* name : {"factor", "low_freq_factor", "high_freq_factor"})
    if (!members.has(name)) members.fail(name, "a number above 0");
  shape.has_rope_scaling = true;
  shape.rope_scaling.factor = members.positive("factor", 1);
  shape.rope_scaling.low_freq_factor = members.positive("low_freq_factor", 1);
  shape.rope_scaling.high_freq_factor = members.positive("high_freq_factor", 4);
  shape.rope_scaling.original_max_position_embeddings = members.integer("original_max_position_embeddings", 1, 1 << 30);
  if (shape.rope_scaling.high_freq_factor <= shape.rope_scaling.low_freq_factor)
    members.fail("high_freq_factor", "above low_freq_factor");
}

// Routing that looks at more than one token, or that is random, cannot be shared; other routers are not Qwen3-MoE's.
void refuse_routing(const Members& config) {
  const auto refuse = [&](const char* name, const char* supported) {
    config.refuse(text_of(name, " = ", shown(config.at(name))), supported);
  };
  const auto set = [&](const char* name) {
    return config.has(name) && config.at(name) != Json(false) && config.at(name) != Json(0) &&
           config.at(name) != Json(0.0);
  };
  for (const char* name : {"router_jitter_noise", "input_jitter_noise", "jitter_noise", "router_noise",
                           "router_noise_std", "moe_input_jitter_eps"})
    if (set(name)) refuse(name, "a router without noise (a shared row must be routed the same in every rollout)");
  for (const char* name : {"expert_capacity", "capacity_factor", "moe_capacity_factor", "expert_capacity_factor",
                           "moe_expert_capacity_factor", "moe_token_drop_policy", "moe_pad_expert_input_to_capacity"})
    if (set(name)) refuse(name, "experts without a capacity: no token is dropped for what other tokens chose");
  for (const char* name : {"expert_choice", "use_expert_choice", "balanced_routing"})
    if (set(name)) refuse(name, "tokens that choose experts, each on its own");
  if (config.has("moe_router_load_balancing_type") && config.at("moe_router_load_balancing_type") == Json("sinkhorn"))
    refuse("moe_router_load_balancing_type", "tokens that choose experts, each on its own");
  for (const char* name : {"shared_expert_intermediate_size", "n_shared_experts", "num_shared_experts"})
    if (set(name)) refuse(name, "layers without shared experts");
  for (const char* name : {"scoring_func", "moe_router_score_function"})
    if (config.has(name) && config.at(name) != Json("softmax")) refuse(name, "softmax over all experts");
  for (const char* name : {"n_group", "topk_group", "routed_scaling_factor"})
    if (config.has(name) && config.at(name) != Json(1) && config.at(name) != Json(1.0))
      refuse(name, "the top-k over all experts, without groups or scaling");
}

void read_experts(const Members& config, ModelShape& shape) {
  // Recent transformers save num_experts under the other name.
  shape.experts = config.integer(config.has("num_experts") ? "num_experts" : "num_local_experts", 1, 65536);
  shape.experts_per_token = config.integer("num_experts_per_tok", 1, shape.experts);
  shape.expert_inner = config.integer("moe_intermediate_size", 1, 1 << 24);
  shape.norm_topk_prob = config.flag("norm_topk_prob", false);
  const std::int64_t step = config.integer("decoder_sparse_step", 1, 1 << 20, 1);
  for (std::int64_t layer = 0; layer < shape.layers; ++layer)
    shape.expert_layer[layer] = static_cast<std::uint8_t>((layer + 1) % step == 0);
  if (!config.has("mlp_only_layers")) return;
  if (!config.at("mlp_only_layers").is_array()) config.fail("mlp_only_layers", "a list of layer numbers");
  for (const Json& layer : config.at("mlp_only_layers")) {
    if (!layer.is_number_integer() || layer.get<std::int64_t>() < 0 || layer.get<std::int64_t>() >= shape.layers)
      config.fail("mlp_only_layers", text_of("a list of numbers in [0, ", shape.layers, ")"));
    shape.expert_layer[layer.get<std::int64_t>()] = 0;
  }
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

ModelShape shape_of_family(const Members& config, const Family& family) {
  ModelShape shape;
  shape.architecture = text_of(family.name, kLanguageModel);
  shape.layers = config.integer("num_hidden_layers", 1, 10000);
  shape.hidden = config.integer("hidden_size", 1, 1 << 20);
  shape.inner = config.integer("intermediate_size", 1, 1 << 24);
  shape.heads = config.integer("num_attention_heads", 1, 65536);
  const bool as_heads = family.kv_heads == 0 || config.is_null("num_key_value_heads");
  shape.kv_heads = config.integer("num_key_value_heads", 1, shape.heads, as_heads ? shape.heads : family.kv_heads);
  if (!config.has("head_dim") && family.head_dim == 0 && shape.hidden % shape.heads != 0)
    config.fail("hidden_size",
                text_of("a multiple of num_attention_heads = ", shape.heads, " where head_dim is absent"));
  shape.head_dim = config.integer("head_dim", 1, 4096, family.head_dim ? family.head_dim : shape.hidden / shape.heads);
  check_heads(config, shape);
  shape.vocabulary = config.integer("vocab_size", 1, 1 << 26);
  shape.max_positions = config.integer("max_position_embeddings", 1, 1 << 30, family.max_positions);
  shape.rms_norm_eps = config.positive("rms_norm_eps", 1e-6);
  shape.initializer_range = config.positive("initializer_range", 0.02);
  shape.tied_head = config.flag("tie_word_embeddings", false);
  if (config.has("pad_token_id")) {
    shape.pad_token = config.integer("pad_token_id", -shape.vocabulary, shape.vocabulary - 1);
    if (shape.pad_token < 0) shape.pad_token += shape.vocabulary;  // from the end, as nn.Embedding counts
  }
  const bool attention_bias = family.bias_members && config.flag("attention_bias", false);
  shape.qkv_bias = family.qkv_bias || attention_bias;
  shape.output_bias = attention_bias;
  shape.mlp_bias = family.mlp_bias_member && config.flag("mlp_bias", false);
  shape.qk_norm = family.qk_norm;
  shape.stored_dtype = read_dtype(config);
  shape.expert_layer.assign(shape.layers, 0);
  read_rope(config, shape);
  if (family.experts) {
    refuse_routing(config);
    read_experts(config, shape);
  }

  refuse_dropout(config);
  read_windows(config, family, shape);
  const std::string activation = config.text("hidden_act", "silu");
  if (activation != "silu" && activation != "swish")
    config.refuse("hidden_act '" + activation + "'", "hidden_act silu");
  if (config.has("quantization_config")) config.refuse("quantization_config", "weights that are not quantised");
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
    const bool named = is_name_on_hub(where) && !std::filesystem::exists(path, ignored);
    throw InputError({where, named ? "a model directory on this machine" : "a Hugging Face config.json",
                      named ? "no such directory" : "no readable file",
                      named ? "If it is a model on the Hugging Face Hub, download it: hf download " + where +
                                  " --local-dir " + path.filename().string() + ", and give that directory"
                            : "Give a model directory or its config.json"});
  }
  std::ostringstream text;
  text << in.rdbuf();
  try {
    return Json::parse(text.str());
  } catch (const nlohmann::json::exception& problem) {
    throw InputError({where, "JSON", problem.what(), ""});
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
  return shape_of_family(config, architecture_of(config, false).family);
}

CriticShape critic_shape_of(const Json& json, const std::string& where) {
  check_object(json, where);
  const Members config(json, where);
  if (!config.has("architectures")) config.fail("architectures", "a list of one name");
  const Architecture architecture = architecture_of(config, true);
  if (architecture.classifier) check_one_label(config);
  ModelShape shape = shape_of_family(config, architecture.family);
  shape.architecture = text_of(architecture.family.name, kClassifier);
  shape.value_head = true;
  shape.tied_head = false;
  return {std::move(shape), architecture.classifier};
}

ModelShape read_model_shape(const std::filesystem::path& given) {
  const std::filesystem::path path = config_path(given);
  return model_shape_of(read_config(path), path.string());
}

CriticShape read_critic_shape(const std::filesystem::path& given) {
  const std::filesystem::path path = config_path(given);
  return critic_shape_of(read_config(path), path.string());
}

std::int64_t ModelShape::expert_layers() const {
  return std::count(expert_layer.begin(), expert_layer.end(), std::uint8_t{1});
}

}  // namespace espalier
