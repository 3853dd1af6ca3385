#include "espalier/shape/additions.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <stdexcept>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/base/expression.h"
#include "espalier/shape/name_lists.h"

namespace espalier {
namespace {

constexpr const char* kTargets =
    "all-linear, or a list of names of modules (q_proj, v_proj, lm_head, gate, experts, experts.down_proj), or a "
    "regular "
    "expression over whole names of modules";

[[noreturn]] void refuse_target(const std::string& got, const std::string& remedy) {
  throw OptionError({"--lora-target", kTargets, got, remedy});
}

// A module that can be adapted, as transformers calls it.
struct Adaptable {
  std::string module;
  bool linear = true;    // an nn.Linear in a layer: all-linear names it. Others are parameters, or the head
  bool experts = false;  // of all experts of the layer
};

// Calls visit(adaptable, projection, bits, bit) for the projections of a layer; several of them may be one module.
// `adapted`: the layer's, in which `bits & bit` says whether the projection is adapted.
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
        const bool linear = !of_experts && (&product != router || shape.names.linear_router);
        visit(Adaptable{layer_prefix(number) + module_name(name), linear, of_experts}, projection, bits, bit);
      });
}

constexpr const char* kHead = "lm_head";

// A projection outside of layers that can be adapted, and the member that says so.
struct OuterSlot {
  Adaptable adaptable;
  ProjectionShape projection;
  bool Additions::*adapted;
};
std::vector<OuterSlot> outer_slots(const ModelShape& shape) {
  std::vector<OuterSlot> out;
  const OuterParameters outer = outer_parameters(shape);
  if (!shape.value_head) out.push_back({{kHead, false}, adapted_head(shape), &Additions::head});
  if (const ProjectionShape& p = outer.layer_projection; p.weights() > 0)
    out.push_back({{p.name}, p, &Additions::layer_inputs});
  return out;
}

std::vector<Adaptable> all_adaptable(const ModelShape& shape) {
  std::vector<Adaptable> out;
  std::set<std::string> seen;
  for (std::int64_t layer = 0; layer < shape.layers(); ++layer) {
    AdaptedLayer any;
    for_each_slot(shape, layer, any, [&](const Adaptable& one, const ProjectionShape&, std::uint32_t, std::uint32_t) {
      if (seen.insert(one.module).second) out.push_back(one);
    });
  }
  for (const OuterSlot& slot : outer_slots(shape)) out.push_back(slot.adaptable);
  return out;
}

bool ends_module(const std::string& module, const std::string& item) {
  return module == item || module.ends_with("." + item);
}

// True if the item of --lora-target names a module, as peft reads it. Names reach experts if they say so, as in peft,
// where a layer's experts are parameters of one module.
std::function<bool(const Adaptable&)> target_of(const std::string& item) {
  if (item == "all-linear") return [](const Adaptable& one) { return one.linear; };
  if (is_dotted_name(item))
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

// A matrix of the model that the item names and that cannot be adapted here; empty: there is none.
std::string named_beside(const ModelShape& shape, const std::string& item) {
  const OuterParameters outer = outer_parameters(shape);
  for (const char* const name : {outer.embedding.name, outer.layer_embedding.name})
    if (name[0] != '\0' && item != "all-linear" && target_of(item)({name})) return name;
  return {};
}

}  // namespace

void add_additions(ModelShape& shape, const AdditionChoice& choice) {
  if (!takes_additions(shape))
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
  for (const std::string& item : choice.modules ? std::vector<std::string>{} : split_names(choice.target)) {
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
  shape.trained.added = {choice.rank, choice.alpha, choice.root_of_rank};
  for (const OuterSlot& slot : outer_slots(shape)) {
    if (!chosen.contains(slot.adaptable.module)) continue;
    check_rank(slot.projection, slot.adaptable.module);
    shape.trained.added.*slot.adapted = true;
  }
  set_adapted(shape, of_layer);
}

void check_beside_additions(const ModelShape& shape, const std::vector<ParameterShape>& parameters,
                            const std::vector<bool>& trains, const char* expected) {
  std::set<std::string> adapted;
  for (const AddedPair& pair : added_pairs(shape)) adapted.insert(pair.weight);
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (trains[i] && adapted.contains(parameters[i].name))
      throw OptionError({"--train", expected, "'" + parameters[i].name + "', which has an adapter",
                         "leave it out of --train or of --lora-target"});
}

std::string words_with_additions(const ModelShape& shape, const std::string& words) {
  const Additions& added = shape.trained.added;
  std::map<std::string, std::string> layers_of;
  for (std::int64_t layer = 0; layer < shape.layers(); ++layer)
    for_each_slot(shape, layer, shape.at(layer).adapted,
                  [&](const Adaptable& one, const ProjectionShape& p, std::uint32_t bits, std::uint32_t bit) {
                    if ((bits & bit) == 0 || p.shares_a) return;
                    layers_of[one.module.substr(layer_prefix(layer).size())] += text_of(" ", layer);
                  });
  for (const OuterSlot& slot : outer_slots(shape))
    if (added.*slot.adapted) layers_of[slot.adaptable.module] = "";
  std::string out = text_of(words == "all" ? "" : words + " ", "lora(r=", added.rank, ", alpha=", added.alpha,
                            added.root_of_rank ? ", rslora)" : ")");
  for (const auto& [name, layers] : layers_of) out += " " + name + layers;
  return out;
}

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

void set_adapted(ModelShape& shape, const std::vector<AdaptedLayer>& of_layer) {
  ESPALIER_INTERNAL_EQ(of_layer.size(), shape.layer.size());
  std::map<MixerKind, std::uint32_t> of_mixer;
  std::map<MlpKind, std::uint32_t> of_mlp;
  for (std::size_t i = 0; i < of_layer.size(); ++i) {
    LayerShape& layer = shape.layer[i];
    layer.adapted = of_layer[i];
    const LayerParameters p = layer_parameters(shape, layer);
    const auto add = [](const PartParameters& part, std::uint32_t projections, std::uint32_t& products) {
      for (std::size_t product = 0; product < part.products().size(); ++product)
        for (std::size_t j = 0; j < part.products()[product].parts.size(); ++j)
          products |= (projections >> part.number(product, j) & 1) << product;
    };
    add(p.mixer, layer.adapted.mixer, of_mixer[layer.mixer->kind()]);
    add(p.mlp, layer.adapted.mlp, of_mlp[layer.mlp]);
  }
  for (LayerShape& layer : shape.layer) layer.adapted_alike = {of_mixer[layer.mixer->kind()], of_mlp[layer.mlp]};
}

bool takes_additions(const ModelShape& shape) {
  const ParameterNames& names = shape.names;
  return !names.half_blocks && names.fused_shared[0] == '\0' && names.stacked_gate_up[0] == '\0' &&
         names.stacked_down[0] == '\0';
}

ModelShape with_every_addition(ModelShape shape, std::int64_t rank) {
  shape.trained = {};
  shape.trained.added.rank = rank;
  for (const OuterSlot& slot : outer_slots(shape)) shape.trained.added.*slot.adapted = true;
  constexpr std::uint32_t kAll = ~std::uint32_t{0};
  const AdaptedLayer every = takes_additions(shape) ? AdaptedLayer{kAll, kAll} : AdaptedLayer{};
  set_adapted(shape, std::vector<AdaptedLayer>(shape.layer.size(), every));
  return shape;
}

double Additions::scale() const {
  const auto r = static_cast<double>(rank);
  return rank == 0 ? 0 : alpha / (root_of_rank ? std::sqrt(r) : r);
}

PairNames pair_of_module(const std::string& module) { return {module + ".lora_A.weight", module + ".lora_B.weight"}; }

PairNames pair_names(const std::string& prefix, const ProjectionShape& p) {
  return {pair_of_module(prefix + (p.joint[0] == '\0' ? p.name : p.joint)).a, pair_of_module(prefix + p.name).b};
}

void refuse_held_alone(quantised::Kind kind) {
  throw OptionError({text_of("--weights ", quantised::rows_of(kind).word),
                     text_of("adapters to train: matrices in ", quantised::rows_of(kind).name, " do not change"),
                     "a run that trains weights", "add --lora-rank or --adapter, or leave --weights out"});
}

void require_device_adds(const ModelShape& shape, bool in_host_memory) {
  if (in_host_memory) return;
  using Numbers = ExpertProductNumbers;
  const char* found = nullptr;
  for (const LayerShape& layer : shape.layer) {
    if (!layer.has_experts()) continue;
    const auto adapts = [&](std::size_t one, std::size_t other) {
      return layer.adapted_alike.of_mlp(one) || layer.adapted_alike.of_mlp(other);
    };
    if (adapts(Numbers::shared_gate_up, Numbers::shared_down)) found = "adapters of shared experts";
    if (!adapts(Numbers::gate_up, Numbers::down)) continue;
    found = "adapters of experts";
    break;
  }
  if (found != nullptr)
    throw UnsupportedError({"--lora-target", "modules other than experts and shared experts on a GPU", found,
                            "use --device cpu, or leave them out of --lora-target"});
}

void require_shards_add(const ModelShape& shape) {
  if (shape.tied_head && shape.trained.added.head)
    throw OptionError(
        {"--shard", "none or optimizer, because the head is tied to the embedding and has an adapter", "full", ""});
}

}  // namespace espalier
