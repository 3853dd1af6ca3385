#include "espalier/shape/trained_parameters.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/base/expression.h"
#include "espalier/shape/name_lists.h"
#include "espalier/shape/parameter_shapes.h"

namespace espalier {
namespace {

constexpr const char* kExpected =
    "all, or a list of embeddings, norms, attention, mlp, router, experts, head, names of modules (o_proj) and regular "
    "expressions over tensor names";

[[noreturn]] void refuse(const std::string& got, const std::string& remedy) {
  throw OptionError({"--train", kExpected, got, remedy});
}

using Matcher = std::function<bool(const ParameterShape&)>;

// Null: no group has this name.
Matcher group_of(const std::string& word, const ModelShape& shape) {
  const OuterParameters outer = outer_parameters(shape);
  const std::string embedding = outer.embedding.name, head = shape.tied_head ? embedding : outer.head.name;
  const std::string of_layers = outer.layer_embedding.name;
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
  if (word == "embeddings" && !of_layers.empty())
    return [own = starts(embedding), more = starts(of_layers)](const ParameterShape& p) { return own(p) || more(p); };
  if (word == "embeddings") return starts(embedding);
  if (word == "head") return starts(head);
  if (word == "norms") return is_norm;
  if (word == "attention") return [=](const ParameterShape& p) { return p.of_mixer && !is_norm(p); };
  if (word == "router") return below(router);
  if (word == "experts") return [](const ParameterShape& p) { return p.expert >= 0; };
  if (word == "mlp")
    return [router](const ParameterShape& p) {
      const bool of_mlp = has_part(p.name, "mlp") || has_part(p.name, "shared_mlp") || has_part(p.name, "feed_forward");
      return p.expert < 0 && of_mlp && !has_part(p.name, router);
    };
  return {};
}

// Names of files, and the names here where they do not number layers otherwise.
Matcher with_names_of_files(const ModelShape& shape, std::function<bool(const std::string&)> matches) {
  return [own = !shape.names.half_blocks, matches = std::move(matches)](const ParameterShape& p) {
    if (p.file.tensor.empty()) return matches(p.name);
    return matches(p.file.tensor) || (own && matches(p.name));
  };
}

Matcher matcher_of(const std::string& item, const ModelShape& shape) {
  if (Matcher group = group_of(item, shape)) return group;
  if (is_plain_name(item))
    return with_names_of_files(
        shape, [item](const std::string& name) { return has_part(name, item) || name.ends_with("." + item); });
  try {
    return with_names_of_files(
        shape, [expression = Expression(item)](const std::string& name) { return expression.matches(name); });
  } catch (const std::invalid_argument& error) {
    refuse("'" + item + "', a damaged expression: " + error.what(), "");
  }
}

// "layer 3 k_proj and v_proj.weight": what is read together, for a person.
std::string words_of(const ModelShape& shape, const ReadTogether& read) {
  const LayerParameters p = layer_parameters(shape, shape.at(read.layer));
  const PartParameters& part = read.in_mixer() ? p.mixer : p.mlp;
  std::vector<std::string> names;
  const auto add = [&](const std::string& name) { names.push_back(name.substr(name.rfind('.') + 1)); };
  const bool product = read.is_product() || read.is_bias();
  if (product)
    for (const ProjectionShape& one : part.products()[read.number].parts) add(one.name);
  else
    for (const TensorShape& one : part.tensors()[read.number].parts)
      add(std::string(one.name).substr(0, std::string_view(one.name).rfind('.')));
  std::string out = text_of(read.layer, " ");
  for (std::size_t i = 0; i < names.size(); ++i)
    out += text_of(i == 0 ? "" : i + 1 < names.size() ? ", " : " and ", names[i]);
  if (!product) return out;
  if (part.products()[read.number].rows == ProductRows::chosen) return out + " of all experts";
  return out + (read.is_bias() ? ".bias" : ".weight");
}

// Parameters that are read together train together: their gradient is one tensor.
void check_products(const ModelShape& shape, const std::vector<bool>& trains) {
  std::map<ReadTogether, bool> seen;
  std::size_t index = 0;
  for_each_parameter(shape, [&](const ParameterShape& p) {
    const bool trained = trains[index++];
    if (p.read.of == ReadTogether::Of::none) return;
    if (const auto [found, added] = seen.emplace(p.read, trained); !added && found->second != trained)
      refuse("a part of layer " + words_of(shape, p.read),
             "one product computes these together: train all of them, or none");
  });
}

// The modules that a quantised checkpoint leaves as they are: names by their end or their beginning, or expressions, as
// transformers reads its config; behind "re:", as compressed-tensors does.
class LeftOut {
 public:
  explicit LeftOut(const StoredQuantised& stored) {
    constexpr std::string_view kExpression = "re:", kOfLanguage = "language_model.";
    for (std::string name : stored.left_out) {
      if (name.empty()) continue;
      if (const std::size_t at = name.find(kOfLanguage); at != name.npos) name.erase(at, kOfLanguage.size());
      if (name.starts_with(kExpression))
        expressions_.push_back(expression(name.substr(kExpression.size()) + ".*"));
      else if (name.find_first_of("*+?[(|^$\\") != name.npos)
        expressions_.push_back(expression("(?:" + name + ")(?:[.].*)?"));
      else
        names_.push_back(name);
    }
  }

  bool has(const std::string& weight) const {
    const std::string module = weight.substr(0, weight.rfind('.'));
    const auto is_named = [&](const std::string& name) {
      return module.ends_with(name) || (module.starts_with(name) && (name.back() == '.' || module[name.size()] == '.'));
    };
    return std::ranges::any_of(names_, is_named) ||
           std::ranges::any_of(expressions_, [&](const Expression& one) { return one.matches(module); });
  }

 private:
  static Expression expression(const std::string& text) {
    try {
      return Expression(text);
    } catch (const std::invalid_argument& error) {
      throw InputError({"config.json: quantization_config", "names of modules, or regular expressions over them",
                        "'" + text + "', a damaged expression: " + error.what(), ""});
    }
  }

  std::vector<std::string> names_;
  std::vector<Expression> expressions_;
};

// Held parameters of layers. A product reads its matrices in one form: if one is left out, the others are, too.
std::shared_ptr<const std::vector<bool>> quantised_parameters(const ModelShape& shape,
                                                              const std::vector<bool>& trains) {
  const quantised::Rows& rows = quantised::rows_of(shape.trained.quantised_form.kind);
  const LeftOut left_out(shape.stored_quantised);
  std::vector<bool> chosen;
  std::set<ReadTogether> kept;  // products with a matrix that is not quantised
  std::vector<ReadTogether> product;
  for_each_parameter(shape, [&](const ParameterShape& p) {
    const bool may = p.layer >= 0 && is_read_by_products(shape, p);
    product.push_back(may ? p.read : ReadTogether());
    chosen.push_back(may && !trains[chosen.size()]);
    if (!may || !chosen.back()) return;
    if (left_out.has(p.name)) {
      chosen.back() = false;
      kept.insert(p.read);
    } else if (const std::int64_t columns = p.sides[1].size; columns % rows.whole_columns != 0) {
      throw UnsupportedError({text_of("--weights ", rows.word, ": '", p.name, "'"),
                              text_of("a matrix whose inputs are a multiple of ", rows.whole_columns), text_of(columns),
                              "leave --weights out"});
    }
  });
  for (std::size_t i = 0; i < chosen.size(); ++i)
    if (product[i].is_product() && kept.contains(product[i])) chosen[i] = false;
  return std::make_shared<const std::vector<bool>>(std::move(chosen));
}

// The form of matrices that a run holds in few bits: as the files have them, or as they are quantised.
quantised::Form held_form(const StoredQuantised& stored, quantised::Kind kind) {
  const quantised::Rows& rows = quantised::rows_of(kind);
  if (stored.form.kind == kind) return stored.form;
  if (rows.quantises) return rows.usual;
  throw UnsupportedError({text_of("--weights ", rows.word),
                          text_of("a model whose files hold its matrices in ", rows.name), "another one",
                          "leave --weights out, or hold the matrices in NF4 (--weights nf4)"});
}

// True if a held matrix that files store in FP8 is not held so: its float32 numbers are none of bfloat16.
bool widens_fp8(const ModelShape& shape) {
  if (shape.stored_quantised.form.kind != quantised::Kind::fp8) return false;
  const LeftOut left_out(shape.stored_quantised);
  bool any = false;
  for_each_parameter(shape, [&](const ParameterShape& p) {
    any = any || (p.layer >= 0 && !p.trains && !p.quantised && is_read_by_products(shape, p) && !left_out.has(p.name));
  });
  return any;
}

// Sets what follows from `of_parameter`.
void derive(ModelShape& shape, const std::vector<bool>& trains) {
  TrainedParameters& trained = shape.trained;
  for (LayerShape& layer : shape.layer) layer.trains = {};
  trained.first_layer = shape.layers();
  trained.input = trained.head = false;
  const OuterParameters outer = outer_parameters(shape);
  std::size_t index = 0;
  for_each_parameter(shape, [&](const ParameterShape& p) {
    if (!trains[index++]) return;
    if (p.added) {  // the weights that it stands beside do not train
      if (p.layer >= 0) trained.first_layer = std::min(trained.first_layer, p.layer);
      trained.input = trained.input || of_layer_inputs(outer, p.name);
      return;
    }
    if (p.layer < 0) {
      const bool embedding = p.name.starts_with(outer.embedding.name + std::string(".")),
                 of_inputs = of_layer_inputs(outer, p.name);
      trained.input = trained.input || embedding || of_inputs;
      trained.head = trained.head || p.name.starts_with(outer.head.name) || (embedding && shape.tied_head);
      return;
    }
    trained.first_layer = std::min(trained.first_layer, p.layer);
    ProductBits& layer = shape.layer[static_cast<std::size_t>(p.layer)].trains;
    if (p.read.is_product() || p.read.is_bias())
      (p.read.in_mixer() ? layer.mixer : layer.mlp) |= std::uint32_t{1} << p.read.number;
  });
  if (trained.input) trained.first_layer = 0;
}

}  // namespace

bool keeps_own_parameters(const ModelShape& shape) {
  bool keeps = shape.trained.added.exist();
  for_each_parameter(shape, [&](const ParameterShape& p) { keeps = keeps && (p.added || !p.trains); });
  return keeps;
}

ModelShape train_only(ModelShape shape, const TrainedChoice& choice) {
  shape.trained = {};
  for (LayerShape& layer : shape.layer) layer.trains = kEveryProduct, layer.adapted = {}, layer.adapted_alike = {};
  const bool adapted = choice.added.exist();
  const bool quantises = choice.held != quantised::Kind::none;
  if (quantises) shape.trained.quantised_form = held_form(shape.stored_quantised, choice.held);
  if (quantises && !adapted && !choice.frozen) refuse_held_alone(choice.held);
  if (adapted) add_additions(shape, choice.added);
  std::vector<ParameterShape> parameters;
  for_each_parameter(shape, [&](const ParameterShape& p) { parameters.push_back(p); });
  std::vector<bool> trains(parameters.size(), false);
  for (std::size_t i = 0; i < parameters.size(); ++i) trains[i] = parameters[i].added;
  const bool all_held = (adapted || choice.frozen) && choice.words == "all";
  for (const std::string& item : all_held ? std::vector<std::string>() : split_names(choice.words)) {
    if (item.empty()) refuse("'" + choice.words + "'", "");
    const Matcher matches = matcher_of(item, shape);
    bool any = false;
    for (std::size_t i = 0; i < parameters.size(); ++i)
      if (!parameters[i].added && matches(parameters[i])) any = trains[i] = true;
    if (!any && !shape.value_head)
      refuse("'" + item + "', which matches no parameter of " + shape.architecture,
             "names are those of the tensors in model.safetensors");
  }
  if (shape.value_head && !choice.frozen)
    for (std::size_t i = 0; i < parameters.size(); ++i)
      if (parameters[i].name.starts_with(outer_parameters(shape).head.name))
        trains[i] = parameters[i].name.ends_with(".weight") || !scores_sequences(shape);
  for (std::size_t i = 0; i < parameters.size(); ++i) trains[i] = trains[i] && parameters[i].trains;
  if (!adapted && std::ranges::find(trains, false) == trains.end()) return shape;
  if (adapted) check_beside_additions(shape, parameters, trains, kExpected);
  check_products(shape, trains);
  derive(shape, trains);
  if (quantises) shape.trained.quantised_parameters = quantised_parameters(shape, trains);
  shape.trained.words = adapted ? words_with_additions(shape, choice.words) : choice.words;
  shape.trained.of_parameter = std::make_shared<const std::vector<bool>>(std::move(trains));
  shape.trained.narrow = choice.narrow && shape.stored_dtype == DType::bfloat16 && !widens_fp8(shape);
  return shape;
}

}  // namespace espalier
