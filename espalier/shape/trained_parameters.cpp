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

bool has_part(const std::string& name, const std::string& part) {
  const std::size_t at = ("." + name).find("." + part + ".");
  return at != std::string::npos;
}

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

bool is_plain(const std::string& item) {
  return std::ranges::all_of(item, [](char c) {
    return c == '_' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
  });
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
  if (is_plain(item))
    return with_names_of_files(
        shape, [item](const std::string& name) { return has_part(name, item) || name.ends_with("." + item); });
  try {
    return with_names_of_files(
        shape, [expression = Expression(item)](const std::string& name) { return expression.matches(name); });
  } catch (const std::invalid_argument& error) {
    refuse("'" + item + "', a damaged expression: " + error.what(), "");
  }
}

// Names with dots between them.
bool is_dotted(const std::string& item) {
  std::string names = item;
  std::erase(names, '.');
  return is_plain(names);
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
    if (p.low_rank || p.read.of == ReadTogether::Of::none) return;
    if (const auto [found, added] = seen.emplace(p.read, trained); !added && found->second != trained)
      refuse("a part of layer " + words_of(shape, p.read),
             "one product computes these together: train all of them, or none");
  });
}

constexpr const char* kTargets =
    "all-linear, or a list of names of modules (q_proj, v_proj, lm_head, gate, experts, experts.down_proj), or a "
    "regular "
    "expression over whole names of modules";

[[noreturn]] void refuse_target(const std::string& got, const std::string& remedy) {
  throw OptionError({"--lora-target", kTargets, got, remedy});
}

// A module that can have an adapter, as transformers calls it.
struct Adaptable {
  std::string module;
  bool linear = true;    // an nn.Linear in a layer: all-linear names it. Others are parameters, or the head
  bool experts = false;  // of all experts of the layer
};

// Calls visit(adaptable, projection, bits, bit) for the projections of a layer; several of them may be one module.
// `adapted`: the layer's, in which `bits & bit` says whether the projection has an adapter.
template <class Adapted, class Visit>
void for_each_slot(const ModelShape& shape, std::int64_t number, Adapted& adapted, Visit visit) {
  LayerParameters p = layer_parameters(shape, shape.at(number));
  const ProductShape* const router = p.experts > 0 ? &p.mlp.products()[ExpertProductNumbers::router] : nullptr;
  const ProductShape* const down = p.experts > 0 ? &p.mlp.products()[ExpertProductNumbers::down] : nullptr;
  for_each_projection(
      p, adapted, [&](const ProjectionShape& projection, const ProductShape& product, auto& bits, std::uint32_t bit) {
        const bool of_experts = product.rows == ProductRows::chosen;
        const std::string name =
            of_experts ? std::string(shape.names.experts) + (&product == down ? ".down_proj" : ".gate_up_proj")
            : projection.joint[0] == '\0' ? projection.name
                                          : projection.joint;
        visit(Adaptable{layer_prefix(number) + module_name(name), !of_experts && &product != router, of_experts},
              projection, bits, bit);
      });
}

constexpr const char* kHead = "lm_head";

std::vector<Adaptable> all_adaptable(const ModelShape& shape) {
  std::vector<Adaptable> out;
  std::set<std::string> seen;
  for (std::int64_t layer = 0; layer < shape.layers(); ++layer) {
    AdaptedLayer any;
    for_each_slot(shape, layer, any, [&](const Adaptable& one, const ProjectionShape&, std::uint32_t, std::uint32_t) {
      if (seen.insert(one.module).second) out.push_back(one);
    });
  }
  if (!shape.value_head) out.push_back({kHead, false});
  return out;
}

bool ends_module(const std::string& module, const std::string& item) {
  return module == item || module.ends_with("." + item);
}

// True if the item of --lora-target names a module, as peft reads it. Names reach experts if they say so, as in peft,
// where a layer's experts are parameters of one module.
std::function<bool(const Adaptable&)> target_of(const std::string& item) {
  if (item == "all-linear") return [](const Adaptable& one) { return one.linear; };
  if (is_dotted(item))
    return [item](const Adaptable& one) {
      if (!one.experts) return ends_module(one.module, item);
      const bool of_all = ends_module(one.module.substr(0, one.module.rfind('.')), item);
      return of_all || (has_part(item, "experts") && ends_module(one.module, item)) || item == "gate_up_proj";
    };
  try {
    return [expression = Expression(item)](const Adaptable& one) { return expression.matches(one.module); };
  } catch (const std::invalid_argument& error) {
    refuse_target("'" + item + "', a damaged expression: " + error.what(), "");
  }
}

// A matrix of the model that the item names and that cannot have an adapter here; empty: there is none.
std::string named_beside(const ModelShape& shape, const std::string& item) {
  const OuterParameters outer = outer_parameters(shape);
  if (item == "all-linear") return outer.layer_projection.name;
  for (const char* const name : {outer.embedding.name, outer.layer_embedding.name, outer.layer_projection.name})
    if (name[0] != '\0' && target_of(item)({name})) return name;
  return {};
}

// Sets the adapters of the shape.
void add_adapters(ModelShape& shape, const AdapterChoice& choice) {
  if (!takes_adapters(shape))
    throw UnsupportedError({"--lora-rank", "a model whose layers are a mixer and an MLP, in transformers' modules",
                            shape.architecture + ", whose files split blocks or stack matrices",
                            "train its weights (--train), or its adapters with espalier.hf"});
  if (shape.beside_vision)
    throw UnsupportedError({"--lora-rank", "a text model in a directory of its own",
                            shape.architecture + ", in whose files peft names modules otherwise",
                            "train its weights (--train)"});
  const std::vector<Adaptable> all = all_adaptable(shape);
  std::set<std::string> chosen;
  if (choice.modules) chosen = *choice.modules;
  for (const std::string& item : choice.modules ? std::vector<std::string>{} : split(choice.target)) {
    if (const std::string other = named_beside(shape, item); !other.empty())
      refuse_target("'" + item + "', which names " + other,
                    "adapters stand beside linear layers, routers and experts; --train embeddings trains the look-up");
    const auto matches = target_of(item);
    bool any = shape.value_head && matches({kHead, false});  // a critic has another head
    for (const Adaptable& one : all)
      if (matches(one)) any = true, chosen.insert(one.module);
    if (item.empty() || !any)
      refuse_target("'" + item + "', which matches no module of " + shape.architecture,
                    "module names are those of transformers: for most families those before .weight in "
                    "model.safetensors; experts are experts.gate_up_proj and experts.down_proj");
  }
  for (const std::string& module : chosen)
    if (std::ranges::find(all, module, &Adaptable::module) == all.end())
      throw UnsupportedError({"--adapter: '" + module + "'",
                              "adapters of linear layers, of routers, and of all experts of a layer together",
                              "one of another module", "merge it into the model (espalier merge)"});
  const auto check_rank = [&](const ProjectionShape& p, const std::string& module) {
    if (const std::int64_t most = std::min(p.out.size, p.in.size); choice.rank > most && !choice.any_rank)
      throw OptionError({"--lora-rank", text_of("at most ", most, ", the smaller side of ", module),
                         text_of(choice.rank), "take a smaller rank, or leave the module out of --lora-target"});
  };
  std::vector<AdaptedLayer> of_layer(shape.layer.size());
  for (std::int64_t layer = 0; layer < shape.layers(); ++layer)
    for_each_slot(shape, layer, of_layer[static_cast<std::size_t>(layer)],
                  [&](const Adaptable& one, const ProjectionShape& p, std::uint32_t& bits, std::uint32_t bit) {
                    if (!chosen.contains(one.module)) return;
                    bits |= bit;
                    if (p.out.size > 1) check_rank(p, one.module);  // a gate has one output
                  });
  const bool head = chosen.contains(kHead);
  if (head) check_rank({kHead, {shape.vocabulary}, {shape.hidden}}, kHead);
  shape.trained.adapter = {choice.rank, choice.alpha, choice.root_of_rank, head};
  set_adapters(shape, of_layer);
}

void check_beside_adapters(const ModelShape& shape, const std::vector<ParameterShape>& parameters,
                           const std::vector<bool>& trains) {
  std::set<std::string> adapted;
  for (const AdapterPart& part : adapter_parts(shape)) adapted.insert(part.weight);
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (trains[i] && adapted.contains(parameters[i].name))
      refuse("'" + parameters[i].name + "', which has an adapter", "leave it out of --train or of --lora-target");
}

// "norms lora(r=8, alpha=16): q_proj, v_proj": what a checkpoint is compared by.
std::string words_with_adapters(const ModelShape& shape, const std::string& words) {
  const AdapterShape& adapter = shape.trained.adapter;
  std::map<std::string, std::string> layers_of;
  for (std::int64_t layer = 0; layer < shape.layers(); ++layer)
    for_each_slot(shape, layer, shape.at(layer).adapted,
                  [&](const Adaptable& one, const ProjectionShape& p, std::uint32_t bits, std::uint32_t bit) {
                    if ((bits & bit) == 0 || p.shares_a) return;
                    layers_of[one.module.substr(layer_prefix(layer).size())] += text_of(" ", layer);
                  });
  if (adapter.head) layers_of[kHead] = "";
  std::string out = text_of(words == "all" ? "" : words + " ", "lora(r=", adapter.rank, ", alpha=", adapter.alpha,
                            adapter.root_of_rank ? ", rslora)" : ")");
  for (const auto& [name, layers] : layers_of) out += " " + name + layers;
  return out;
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
    if (p.low_rank) {  // the weights that it stands beside do not train
      if (p.layer >= 0) trained.first_layer = std::min(trained.first_layer, p.layer);
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

std::vector<std::string> adaptable_modules(const ModelShape& shape) {
  std::vector<std::string> out;
  for (const Adaptable& one : all_adaptable(shape)) out.push_back(one.module);
  return out;
}

bool adapts_experts(const ModelShape& shape) {
  constexpr std::uint32_t kOfExperts = 1U << ExpertProductNumbers::gate_up | 1U << ExpertProductNumbers::down;
  return std::ranges::any_of(shape.layer, [](const LayerShape& layer) {
    return layer.has_experts() && (layer.adapted.mlp & kOfExperts) != 0;
  });
}

bool trains_adapters_alone(const ModelShape& shape) {
  bool alone = shape.trained.adapter.rank > 0;
  for_each_parameter(shape, [&](const ParameterShape& p) { alone = alone && (p.low_rank || !p.trains); });
  return alone;
}

ModelShape train_only(ModelShape shape, const TrainedChoice& choice) {
  shape.trained = {};
  for (LayerShape& layer : shape.layer) layer.trains = kEveryProduct, layer.adapted = {}, layer.adapted_alike = {};
  const bool adapted = choice.adapter.rank > 0;
  const bool quantises = choice.held != quantised::Kind::none;
  if (quantises) shape.trained.quantised_form = held_form(shape.stored_quantised, choice.held);
  if (quantises && !adapted && !choice.frozen)
    throw OptionError(
        {text_of("--weights ", quantised::rows_of(choice.held).word),
         text_of("adapters to train: matrices in ", quantised::rows_of(choice.held).name, " do not change"),
         "a run that trains weights", "add --lora-rank or --adapter, or leave --weights out"});
  if (adapted) add_adapters(shape, choice.adapter);
  std::vector<ParameterShape> parameters;
  for_each_parameter(shape, [&](const ParameterShape& p) { parameters.push_back(p); });
  std::vector<bool> trains(parameters.size(), false);
  for (std::size_t i = 0; i < parameters.size(); ++i) trains[i] = parameters[i].low_rank;
  const bool all_held = (adapted || choice.frozen) && choice.words == "all";
  for (const std::string& item : all_held ? std::vector<std::string>() : split(choice.words)) {
    if (item.empty()) refuse("'" + choice.words + "'", "");
    const Matcher matches = matcher_of(item, shape);
    bool any = false;
    for (std::size_t i = 0; i < parameters.size(); ++i)
      if (!parameters[i].low_rank && matches(parameters[i])) any = trains[i] = true;
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
  if (adapted) check_beside_adapters(shape, parameters, trains);
  check_products(shape, trains);
  derive(shape, trains);
  if (quantises) shape.trained.quantised_parameters = quantised_parameters(shape, trains);
  shape.trained.words = adapted ? words_with_adapters(shape, choice.words) : choice.words;
  shape.trained.of_parameter = std::make_shared<const std::vector<bool>>(std::move(trains));
  shape.trained.narrow = choice.narrow && shape.stored_dtype == DType::bfloat16 && !widens_fp8(shape);
  return shape;
}

}  // namespace espalier
