// A family is a set of properties of ModelShape (shape/model_families.h); nothing here knows its name.
#include "espalier/shape/parameter_shapes.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <string_view>
#include <utility>

#include "espalier/base/error.h"

namespace espalier {
namespace {

// What is called with every parameter, and with every part of an adapter.
struct Visits {
  std::function<void(const ParameterShape&)> parameter = [](const ParameterShape&) {};
  std::function<void(const AdapterPart&)> part = [](const AdapterPart&) {};
};

// Visits the parameters of blocks under one prefix.
class Walk {
 public:
  Walk(const Visits& visits, std::string prefix, std::int64_t layer, std::int64_t expert = -1)
      : visits_(visits), prefix_(std::move(prefix)), layer_(layer), expert_(expert) {}

  void norm(const NormShape& norm, bool of_heads = false) const {
    if (norm.width > 0) visit(norm.name, ".weight", {{norm.width}}, of_heads);
    if (norm.width > 0 && norm.bias) visit(norm.name, ".bias", {{norm.width}}, of_heads);
  }
  // A tensor that never trains.
  void held(const TensorShape& tensor) const {
    if (tensor.sides.empty()) return;
    constexpr bool of_heads = false, trains = false;
    visits_.parameter({prefix_ + tensor.name, tensor.sides, layer_, expert_, of_heads, "", trains});
  }
  void tensor(const TensorShape& tensor, bool of_heads = false) const {
    if (!tensor.sides.empty()) visit(tensor.name, "", tensor.sides, of_heads);
  }
  // All weights, then all biases.
  void projections(std::initializer_list<ProjectionShape> neighbours, const std::string& fused = "") const {
    const auto whole = [&](const char* kind) { return fused.empty() ? fused : prefix_ + fused + kind; };
    weights(neighbours, whole(".weight"));
    biases(neighbours, whole(".bias"));
    adapters(neighbours);
  }
  // A and B of each; the Bs of joint ones stand behind their A, one behind the other.
  void adapters(std::initializer_list<ProjectionShape> neighbours) const {
    for (const ProjectionShape& p : neighbours) a_of(p), b_of(p), part(p);
  }
  void a_of(const ProjectionShape& p) const {
    if (p.rank > 0 && !p.shares_a) low_rank(a_name(p), {{p.rank}, p.in}, p);
  }
  void b_of(const ProjectionShape& p) const {
    if (p.rank > 0) low_rank(prefix_ + p.name + ".lora_B.weight", {p.out, {p.rank}}, p);
  }
  void part(const ProjectionShape& p) const {
    if (p.rank == 0) return;
    std::string module = p.joint[0] == '\0' ? p.name : p.joint, prefix = prefix_;
    if (expert_ >= 0) {  // "mlp.experts.3." and "w2"
      prefix.erase(prefix.rfind('.', prefix.size() - 2) + 1);
      if (p.joint[0] == '\0') module = "down_proj";
    }
    visits_.part({a_name(p), prefix_ + p.name + ".lora_B.weight", prefix_ + p.name + ".weight",
                  module_name(prefix + module), layer_, expert_});
  }
  // `fused`: the whole name of the tensor of files.
  void weights(std::initializer_list<ProjectionShape> neighbours, const std::string& fused) const {
    for (const ProjectionShape& p : neighbours)
      if (p.weights() > 0) visit(p.name, ".weight", {p.out, p.in}, p.of_heads, fused);
  }
  void biases(std::initializer_list<ProjectionShape> neighbours, const std::string& fused) const {
    for (const ProjectionShape& p : neighbours)
      if (p.bias) visit(p.name, ".bias", {p.out}, p.of_heads, fused);
  }

 private:
  std::string a_name(const ProjectionShape& p) const {
    return prefix_ + (p.joint[0] == '\0' ? p.name : p.joint) + ".lora_A.weight";
  }
  void low_rank(std::string name, std::vector<Side> sides, const ProjectionShape& p) const {
    ParameterShape out;
    out.name = std::move(name), out.sides = std::move(sides), out.layer = layer_, out.expert = expert_;
    out.low_rank = true;
    out.in_parts = p.out.cut != Cut::none || p.in.cut != Cut::none || p.of_heads;
    visits_.parameter(out);
  }
  void visit(const char* name, const char* kind, std::vector<Side> sides, bool of_heads = false,
             const std::string& fused = "") const {
    visits_.parameter({prefix_ + name + kind, std::move(sides), layer_, expert_, of_heads, fused});
  }

  const Visits& visits_;
  std::string prefix_;
  std::int64_t layer_, expert_;
};

void visit_layer(const ModelShape& shape, const LayerParameters& p, std::int64_t layer, const Visits& visits) {
  const Walk walk(visits, layer_prefix(layer), layer);
  walk.norm(p.attention_norm);
  walk.projections({p.query_latent, p.key_value_latent});
  walk.norm(p.query_latent_norm, true);
  walk.norm(p.key_value_latent_norm, true);
  walk.projections({p.query, p.key, p.value}, shape.names.fused_qkv);
  walk.projections({p.projected[0], p.projected[1], p.projected[2], p.projected[3]});
  walk.projections({p.gate_latents[0], p.gate_latents[1]});
  walk.projections({p.gates[0]});
  walk.projections({p.gates[1]});
  for (const TensorShape& tensor : p.conv) walk.tensor(tensor);
  for (const TensorShape* const tensor : {&p.conv_bias, &p.a_log, &p.dt_bias, &p.skip}) walk.tensor(*tensor);
  walk.tensor(p.mixed_norm, true);
  walk.projections({p.output});
  walk.norm(p.query_norm, true);
  walk.norm(p.key_norm, true);
  walk.tensor(p.sinks);
  walk.norm(p.attention_post_norm);
  walk.norm(p.mlp_norm);
  walk.norm(p.mlp_post_norm);
  if (p.experts == 0) {
    walk.projections({p.gate, p.up}, shape.names.fused_gate_up);
    walk.projections({p.down});
    return;
  }
  walk.projections({p.router});
  walk.held(p.correction_bias);
  const auto packed = [&](const char* name) {
    return shape.names.packed_experts ? layer_prefix(layer) + shape.names.experts + "." + name : std::string();
  };
  const auto stacked = [&](const char* name, const std::string& otherwise) {
    return name[0] != '\0' ? layer_prefix(layer) + name + ".weight" : otherwise;
  };
  const auto each = [&](auto&& of_one) {
    for (std::int64_t e = 0; e < p.experts; ++e) of_one(Walk(visits, expert_prefix(shape, layer, e), layer, e));
  };
  const std::string gate_up = stacked(shape.names.stacked_gate_up, packed("gate_up_proj")),
                    down = stacked(shape.names.stacked_down, packed("down_proj"));
  each([&](const Walk& one) { one.weights({p.gate, p.up}, gate_up); });
  each([&](const Walk& one) { one.weights({p.down}, down); });
  each([&](const Walk& one) { one.biases({p.gate, p.up}, packed("gate_up_proj_bias")); });
  each([&](const Walk& one) { one.biases({p.down}, packed("down_proj_bias")); });
  each([&](const Walk& one) { one.a_of(p.gate); });
  each([&](const Walk& one) { one.b_of(p.gate), one.b_of(p.up); });
  each([&](const Walk& one) { one.a_of(p.down); });
  each([&](const Walk& one) { one.b_of(p.down); });
  for (const ProjectionShape* const projection : {&p.gate, &p.up, &p.down})
    each([&](const Walk& one) { one.part(*projection); });
  walk.projections({p.shared_gate, p.shared_up}, shape.names.fused_shared);
  walk.projections({p.shared_down});
  walk.projections({p.shared_expert_gate});
}

}  // namespace

std::int64_t LayerParameters::parameters() const {
  return attention_norm.parameters() + query_latent.parameters() + key_value_latent.parameters() +
         query_latent_norm.parameters() + key_value_latent_norm.parameters() + query.parameters() + key.parameters() +
         value.parameters() + projected_weights() + conv[0].parameters() + conv[1].parameters() + conv[2].parameters() +
         conv_bias.parameters() + a_log.parameters() + dt_bias.parameters() + skip.parameters() +
         mixed_norm.parameters() + output.parameters() + query_norm.parameters() + key_norm.parameters() +
         sinks.parameters() + attention_post_norm.parameters() + mlp_norm.parameters() + mlp_post_norm.parameters() +
         router.parameters() + correction_bias.parameters() + std::max<std::int64_t>(1, experts) * mlp_parameters() +
         shared_weights() + shared_expert_gate.parameters();
}

std::int64_t LayerParameters::low_rank() const {
  std::int64_t sum = -expert_low_rank();
  const AdaptedLayer any;
  for_each_adaptable(*this, any, [&](const ProjectionShape& p, bool) { sum += p.low_rank(); });
  return sum;
}
std::int64_t LayerParameters::expert_low_rank() const {
  return experts == 0 ? 0 : gate.low_rank() + up.low_rank() + down.low_rank();
}

std::string layer_prefix(std::int64_t layer) { return "model.layers." + std::to_string(layer) + "."; }
std::string module_name(const std::string& name) {
  constexpr std::string_view kNames[][2] = {{"block_sparse_moe.", "mlp."},
                                            {"self_attn.f_a_proj", "self_attn.forget_gate.f_a_proj"},
                                            {"self_attn.f_b_proj", "self_attn.forget_gate.f_b_proj"}};
  for (const auto& [of_files, of_modules] : kNames)
    if (const std::size_t at = name.find(of_files); at != name.npos)
      return name.substr(0, at) + std::string(of_modules) + name.substr(at + of_files.size());
  return name;
}
std::string expert_prefix(const ModelShape& shape, std::int64_t layer, std::int64_t expert) {
  return layer_prefix(layer) + shape.names.experts + "." + std::to_string(expert) + ".";
}

OuterParameters outer_parameters(const ModelShape& shape) {
  const Side M{shape.hidden}, vocabulary{shape.vocabulary, Cut::vocabulary};
  OuterParameters p{{"model.embed_tokens", vocabulary, M},
                    {shape.names.final_norm, shape.hidden, shape.norm == NormKind::layer},
                    {"lm_head", vocabulary, M}};
  if (shape.tied_head) p.head = {"lm_head", {}, M};
  if (shape.value_head) p.head = {"score", {1}, M, true};
  return p;
}

ProjectionShape adapted_head(const ModelShape& shape) {
  const AdapterShape& adapter = shape.trained.adapter;
  return {"lm_head", {shape.vocabulary, Cut::vocabulary}, {shape.hidden}, false, adapter.head ? adapter.rank : 0};
}

bool takes_adapters(const ModelShape& shape) {
  const ParameterNames& names = shape.names;
  return shape.without_mlp.empty() && names.fused_shared[0] == '\0' && names.stacked_gate_up[0] == '\0' &&
         names.stacked_down[0] == '\0';
}

LayerParameters joined_parameters(const ModelShape& shape, std::int64_t layer) {
  LayerParameters p = layer_parameters(shape, shape.has_experts(layer), shape.mixer_of(layer), shape.has_mlp(layer));
  const auto join = [](const char* module, ProjectionShape& first, std::initializer_list<ProjectionShape*> others) {
    if (module[0] == '\0' || first.weights() == 0) return;
    first.joint = module;
    for (ProjectionShape* const other : others) other->joint = module, other->shares_a = true;
  };
  join(shape.names.fused_qkv, p.query, {&p.key, &p.value});
  join(p.experts > 0 ? "gate_up_proj" : shape.names.fused_gate_up, p.gate, {&p.up});
  return p;
}

LayerParameters adapted_parameters(const ModelShape& shape, std::int64_t layer) {
  const AdapterShape& adapter = shape.trained.adapter;
  if (adapter.rank == 0)
    return layer_parameters(shape, shape.has_experts(layer), shape.mixer_of(layer), shape.has_mlp(layer));
  LayerParameters p = joined_parameters(shape, layer);
  for_each_adaptable(p, adapter.of_layer[static_cast<std::size_t>(layer)], [&](ProjectionShape& projection, bool has) {
    projection.rank = has && projection.weights() > 0 ? adapter.rank : 0;
  });
  return p;
}

TrainedWeights trained_weights(const ModelShape& shape) {
  TrainedWeights sum;
  for (std::int64_t layer = 0; layer < shape.layers; ++layer) {
    const LayerParameters p = adapted_parameters(shape, layer);
    sum.layers += p.low_rank();
    sum.experts += p.experts * p.expert_low_rank();
    const TrainedLayer trains =
        shape.trained.all() ? TrainedLayer{} : shape.trained.of_layer[static_cast<std::size_t>(layer)];
    const std::int64_t mlp =
        (trains.gate_up ? p.gate.weights() + p.up.weights() : 0) + (trains.down ? p.down.weights() : 0);
    sum.layers += (trains.query_latent ? p.query_latent.weights() : 0) +
                  (trains.key_value_latent ? p.key_value_latent.weights() : 0);
    sum.layers += (trains.query ? p.query.weights() : 0) +
                  (trains.key_value ? p.key.weights() + p.value.weights() + p.projected_weights() : 0) +
                  (trains.output ? p.output.weights() : 0);
    if (p.experts == 0)
      sum.layers += mlp;
    else
      sum.experts += p.experts * mlp;
    sum.layers += (trains.router ? p.router.weights() : 0) +
                  (trains.shared_gate_up ? p.shared_gate.weights() + p.shared_up.weights() : 0) +
                  (trains.shared_down ? p.shared_down.weights() : 0) +
                  (trains.shared_expert_gate ? p.shared_expert_gate.weights() : 0);
  }
  return sum;
}

namespace {

void for_each_shape(const ModelShape& shape, const Visits& visits) {
  const OuterParameters outer = outer_parameters(shape);
  const Walk walk(visits, "", -1);
  walk.projections({outer.embedding});
  for (std::int64_t layer = 0; layer < shape.layers; ++layer)
    visit_layer(shape, adapted_parameters(shape, layer), layer, visits);
  walk.norm(outer.final_norm);
  walk.projections({outer.head});
  walk.adapters({adapted_head(shape)});
}

}  // namespace

bool is_read_by_products(const ModelShape& shape, const ParameterShape& p) {
  return p.sides.size() == 2 && p.name.ends_with(".weight") && !p.low_rank &&
         (p.expert >= 0 || p.name.find(text_of(".", shape.names.router, ".")) == p.name.npos);
}

void for_each_parameter(const ModelShape& shape, const std::function<void(const ParameterShape&)>& visit) {
  if (shape.trained.all()) return for_each_shape(shape, {.parameter = visit});
  std::size_t index = 0;
  const auto named_visit = [&](const ParameterShape& parameter) {
    ParameterShape named = parameter;
    const TrainedParameters& trained = shape.trained;
    named.nf4 = trained.nf4_parameters && trained.nf4_parameters->at(index);
    named.mapped = trained.mapped_parameters && trained.mapped_parameters->at(index);
    named.trains = trained.of_parameter->at(index++);
    named.narrow = trained.narrow && !named.trains && !named.nf4 && is_read_by_products(shape, named);
    visit(named);
  };
  for_each_shape(shape, {.parameter = named_visit});
}

std::vector<AdapterPart> adapter_parts(const ModelShape& shape) {
  std::vector<AdapterPart> out;
  for_each_shape(shape, {.part = [&](const AdapterPart& part) { out.push_back(part); }});
  return out;
}

double AdapterShape::scale() const {
  const auto r = static_cast<double>(rank);
  return rank == 0 ? 0 : alpha / (root_of_rank ? std::sqrt(r) : r);
}

namespace {

std::int64_t adapter_parameters(const ModelShape& shape) {
  if (shape.trained.adapter.rank == 0) return 0;
  std::int64_t total = adapted_head(shape).low_rank();
  for (std::int64_t layer = 0; layer < shape.layers; ++layer) {
    const LayerParameters p = adapted_parameters(shape, layer);
    total += p.low_rank() + p.experts * p.expert_low_rank();
  }
  return total;
}

}  // namespace

std::int64_t ModelShape::parameters() const {
  const OuterParameters outer = outer_parameters(*this);
  const std::int64_t with_experts = expert_layers();
  std::int64_t total = outer.embedding.parameters() + outer.final_norm.parameters() + outer.head.parameters();
  if (has_states()) {
    for (std::int64_t layer = 0; layer < layers; ++layer)
      total += layer_parameters(*this, has_experts(layer), mixer_of(layer), has_mlp(layer)).parameters();
    return total + adapter_parameters(*this);
  }
  if (with_experts < layers) total += (layers - with_experts) * layer_parameters(*this, false).parameters();
  if (with_experts > 0) total += with_experts * layer_parameters(*this, true).parameters();
  return total + adapter_parameters(*this);
}

}  // namespace espalier
