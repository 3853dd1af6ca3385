#include "espalier/plan/trained_parameters.h"

#include <algorithm>
#include <functional>
#include <map>
#include <regex>
#include <utility>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/plan/parameter_shapes.h"

namespace espalier {
namespace {

constexpr const char* kExpected =
    "all, or a list of embeddings, norms, attention, mlp, router, experts, head, names of modules (o_proj) and regular "
    "expressions over tensor names";

[[noreturn]] void refuse(const std::string& got, const std::string& remedy) {
  throw OptionError({"--train", kExpected, got, remedy});
}

using Matcher = std::function<bool(const ParameterShape&)>;

bool has_part(const std::string& name, const std::string& part) {
  const std::size_t at = ("." + name).find("." + part + ".");
  return at != std::string::npos;
}

// Null: no group has this name.
Matcher group_of(const std::string& word, const ModelShape& shape) {
  const OuterParameters outer = outer_parameters(shape);
  const std::string embedding = outer.embedding.name, head = shape.tied_head ? embedding : outer.head.name;
  const auto below = [](std::string part) {
    return [part = std::move(part)](const ParameterShape& p) { return has_part(p.name, part); };
  };
  const auto starts = [](std::string prefix) {
    return [prefix = std::move(prefix)](const ParameterShape& p) { return p.name.starts_with(prefix + "."); };
  };
  const auto is_norm = [](const ParameterShape& p) {
    return p.name.ends_with("norm.weight") || p.name.ends_with("norm.bias");
  };
  const std::string router = shape.names.router;
  if (word == "all") return [](const ParameterShape&) { return true; };
  if (word == "embeddings") return starts(embedding);
  if (word == "head") return starts(head);
  if (word == "norms") return is_norm;
  if (word == "attention")
    return [=](const ParameterShape& p) {
      return (has_part(p.name, "self_attn") || has_part(p.name, "linear_attn")) && !is_norm(p);
    };
  if (word == "router") return below(router);
  if (word == "experts") return [](const ParameterShape& p) { return p.expert >= 0; };
  if (word == "mlp")
    return [router](const ParameterShape& p) {
      return p.expert < 0 && has_part(p.name, "mlp") && !has_part(p.name, router);
    };
  return {};
}

bool is_plain(const std::string& item) {
  return std::ranges::all_of(item, [](char c) {
    return c == '_' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
  });
}

Matcher matcher_of(const std::string& item, const ModelShape& shape) {
  if (Matcher group = group_of(item, shape)) return group;
  if (is_plain(item)) return [item](const ParameterShape& p) { return has_part(p.name, item); };
  try {
    return [expression = std::regex(item)](const ParameterShape& p) { return std::regex_match(p.name, expression); };
  } catch (const std::regex_error& error) {
    refuse("'" + item + "', a damaged expression: " + error.what(), "");
  }
}

// At commas outside of brackets.
std::vector<std::string> split(const std::string& words) {
  std::vector<std::string> items(1);
  int depth = 0;
  for (const char c : words) {
    if (c == '(' || c == '[' || c == '{') ++depth;
    if (c == ')' || c == ']' || c == '}') --depth;
    if (c == ',' && depth <= 0)
      items.emplace_back();
    else if (c != ' ' || depth > 0)
      items.back() += c;
  }
  return items;
}

bool is_gate_or_up(const ModelShape& shape, const ParameterShape& p) {
  const ParameterNames& names = shape.names;
  return p.expert >= 0 ? has_part(p.name, names.expert_gate) || has_part(p.name, names.expert_up)
                       : p.layer >= 0 && (has_part(p.name, names.gate) || has_part(p.name, names.up));
}
bool is_down(const ModelShape& shape, const ParameterShape& p) {
  return p.layer >= 0 && has_part(p.name, p.expert >= 0 ? shape.names.expert_down : shape.names.down);
}

// What one product reads together trains together: its gradient is one tensor.
std::string product_of(const ModelShape& shape, const ParameterShape& p) {
  const std::string suffix = p.name.substr(p.name.rfind('.')), layer = std::to_string(p.layer);
  if (p.name.find(".in_proj_") != p.name.npos) return layer + " in_proj_* of linear_attn";
  if (has_part(p.name, "k_proj") || has_part(p.name, "v_proj")) return layer + " k_proj and v_proj" + suffix;
  const std::string whose = p.expert >= 0 ? " of all experts" : suffix;
  if (p.expert >= 0 && is_down(shape, p)) return layer + " down_proj" + whose;
  return is_gate_or_up(shape, p) ? layer + " gate_proj and up_proj" + whose : std::string();
}

void check_products(const ModelShape& shape, const std::vector<bool>& trains) {
  std::map<std::string, bool> products;
  std::size_t index = 0;
  for_each_parameter(shape, [&](const ParameterShape& p) {
    const bool trained = trains[index++];
    const std::string product = product_of(shape, p);
    if (product.empty()) return;
    if (const auto [found, added] = products.emplace(product, trained); !added && found->second != trained)
      refuse("a part of layer " + product, "one product computes these together: train all of them, or none");
  });
}

// Sets what follows from `of_parameter`.
void derive(ModelShape& shape, const std::vector<bool>& trains) {
  TrainedParameters& trained = shape.trained;
  trained.of_layer.assign(
      static_cast<std::size_t>(shape.layers),
      {.query = false, .key_value = false, .output = false, .router = false, .gate_up = false, .down = false});
  trained.first_layer = shape.layers;
  trained.input = trained.head = false;
  const OuterParameters outer = outer_parameters(shape);
  std::size_t index = 0;
  for_each_parameter(shape, [&](const ParameterShape& p) {
    if (!trains[index++]) return;
    if (p.layer < 0) {
      const bool embedding = p.name.starts_with(outer.embedding.name);
      trained.input = trained.input || embedding;
      trained.head = trained.head || p.name.starts_with(outer.head.name) || (embedding && shape.tied_head);
      return;
    }
    trained.first_layer = std::min(trained.first_layer, p.layer);
    TrainedLayer& layer = trained.of_layer[static_cast<std::size_t>(p.layer)];
    layer.query = layer.query || has_part(p.name, "q_proj");
    layer.key_value = layer.key_value || has_part(p.name, "k_proj") || p.name.find(".in_proj_") != p.name.npos;
    layer.output = layer.output || has_part(p.name, "o_proj") || has_part(p.name, "out_proj");
    layer.router = layer.router || has_part(p.name, shape.names.router);
    layer.gate_up = layer.gate_up || is_gate_or_up(shape, p);
    layer.down = layer.down || is_down(shape, p);
  });
  if (trained.input) trained.first_layer = 0;
}

}  // namespace

ModelShape train_only(ModelShape shape, const std::string& words) {
  shape.trained = {};
  std::vector<ParameterShape> parameters;
  for_each_parameter(shape, [&](const ParameterShape& p) { parameters.push_back(p); });
  std::vector<bool> trains(parameters.size(), false);
  for (const std::string& item : split(words)) {
    if (item.empty()) refuse("'" + words + "'", "");
    const Matcher matches = matcher_of(item, shape);
    bool any = false;
    for (std::size_t i = 0; i < parameters.size(); ++i)
      if (matches(parameters[i])) any = trains[i] = true;
    if (!any && !shape.value_head)
      refuse("'" + item + "', which names nothing of " + shape.architecture,
             "names are those of the tensors in model.safetensors");
  }
  if (shape.value_head)
    for (std::size_t i = 0; i < parameters.size(); ++i)
      trains[i] = trains[i] || parameters[i].name.starts_with(outer_parameters(shape).head.name);
  for (std::size_t i = 0; i < parameters.size(); ++i) trains[i] = trains[i] && parameters[i].trains;
  if (std::ranges::find(trains, false) == trains.end()) return shape;
  check_products(shape, trains);
  derive(shape, trains);
  shape.trained.words = words;
  shape.trained.of_parameter = std::make_shared<const std::vector<bool>>(std::move(trains));
  return shape;
}

ModelShape read_trained_shape(const std::filesystem::path& directory, const std::string& words) {
  return train_only(read_model_shape(directory), words);
}

ModelShape read_trained_critic_shape(const std::filesystem::path& directory, const std::string& words) {
  return train_only(read_critic_shape(directory).shape, words);
}

}  // namespace espalier
