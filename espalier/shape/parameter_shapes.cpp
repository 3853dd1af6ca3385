// A family is a set of properties of ModelShape (shape/model_families.h); nothing here knows its name.
#include "espalier/shape/parameter_shapes.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/shape/additions.h"
#include "espalier/shape/file_names.h"

namespace espalier {
namespace {

// Functions called with every parameter, and with every pair of an addition.
struct Visits {
  std::function<void(const ParameterShape&)> parameter = [](const ParameterShape&) {};
  std::function<void(const AddedPair&)> pair = [](const AddedPair&) {};
};

using Of = ReadTogether::Of;

// Visits the parameters of a part of a layer, or of none.
class Walk {
 public:
  Walk(const Visits& visits, const ModelShape& shape, const FileNames& files, FileNames::Of part,
       std::int64_t layer = -1)
      : visits_(visits),
        shape_(shape),
        files_(files),
        part_(part),
        layer_(layer),
        prefix_(layer < 0 ? "" : layer_prefix(layer)) {}

  void norm(const NormShape& norm) const {
    if (norm.width == 0) return;
    visits_.parameter(made({.prefix = prefix_}, norm.name, ".weight", {{norm.width}}, {}));
    if (norm.bias) visits_.parameter(made({.prefix = prefix_}, norm.name, ".bias", {{norm.width}}, {}));
  }
  void tensors(const TensorRow& row, std::size_t number) const {
    const ReadTogether read{layer_, of_mixer() ? Of::mixer_tensor : Of::mlp_tensor, number};
    for (const TensorShape& part : row.parts) {
      ParameterShape out = made({.prefix = prefix_}, part.name, "", part.sides, read);
      out.of_heads = row.of_heads, out.trains = row.trains;
      visits_.parameter(out);
    }
  }
  // A projection below or above the layers.
  void outer(const ProjectionShape& p) const {
    if (p.weights() > 0) visits_.parameter(weight({.prefix = prefix_}, p, {}));
    if (p.bias) visits_.parameter(bias({.prefix = prefix_}, p, {}));
  }
  void addition(const ProjectionShape& p) const {
    Rows own;
    addition(p, own);
  }
  // Weights, biases and additions of neighbours: A and B of each; the Bs of joint ones stand behind their A, one behind
  // the other.
  void products(const PartParameters& of, const PartParameters::Entry& entry) const {
    const Owner owner{.prefix = prefix_};
    std::int64_t outputs = 0;
    const auto each = [&](auto&& act) {
      for (std::size_t i = entry.first; i < entry.first + entry.count; ++i)
        for (const ProjectionShape& p : of.products()[i].parts) act(p, i);
    };
    each([&](const ProjectionShape& p, std::size_t) { outputs += p.out.size; });
    const auto visit_all = [&](const char* kind, auto&& make) {
      Rows whole{entry.fused[0] == '\0' ? std::string() : file_name(prefix_ + entry.fused + kind), outputs};
      each([&](const ProjectionShape& p, std::size_t i) {
        if (std::optional<ParameterShape> out = make(p, i)) {
          whole.place(*out);
          visits_.parameter(*out);
        }
      });
    };
    const Of product = of_mixer() ? Of::mixer_product : Of::mlp_product,
             its_bias = of_mixer() ? Of::mixer_bias : Of::mlp_bias;
    visit_all(".weight", [&](const ProjectionShape& p, std::size_t i) {
      return p.weights() > 0 ? std::optional(weight(owner, p, {layer_, product, i})) : std::nullopt;
    });
    visit_all(".bias", [&](const ProjectionShape& p, std::size_t i) {
      return p.bias ? std::optional(bias(owner, p, {layer_, its_bias, i})) : std::nullopt;
    });
    Rows joint{.tensor = "", .outputs = outputs};
    each([&](const ProjectionShape& p, std::size_t) { addition(p, joint); });
  }
  // The products of experts, from the first one on: gate and up of all experts, then down of all of them, then their
  // biases, and their additions likewise.
  void of_experts(const PartParameters& of, const PartParameters::Entry& entry) const {
    if (entry.first != ExpertProductNumbers::gate_up) return;  // down was visited with it
    const ProductShape &gate_up = of.products()[ExpertProductNumbers::gate_up],
                       &down = of.products()[ExpertProductNumbers::down];
    const ParameterNames& names = shape_.names;
    const ExpertTensors of_gate_up(*this, gate_up, names.stacked_gate_up,
                                   shape_.activation.gated ? "gate_up_proj" : "up_proj"),
        of_down(*this, down, names.stacked_down, "down_proj");
    const auto each = [&](const ProductShape& product, auto&& act) {
      for (std::int64_t e = 0; e < shape_.experts; ++e)
        for (std::size_t i = 0; i < product.parts.size(); ++i)
          act(Owner{expert_prefix(shape_, layer_, e), e}, product.parts[i], static_cast<std::int64_t>(i));
    };
    const ReadTogether read_gate_up{layer_, Of::mlp_product, ExpertProductNumbers::gate_up},
        read_down{layer_, Of::mlp_product, ExpertProductNumbers::down};
    const auto visit_all = [&](const ProductShape& product, const ExpertTensors& tensors, auto&& make) {
      each(product, [&](const Owner& one, const ProjectionShape& p, std::int64_t i) {
        if (std::optional<ParameterShape> out = make(one, p)) {
          tensors.place(*out, i);
          visits_.parameter(*out);
        }
      });
    };
    for (const auto& [product, tensors, read] :
         {std::tuple{&gate_up, &of_gate_up, &read_gate_up}, {&down, &of_down, &read_down}})
      visit_all(*product, *tensors, [&, read = read](const Owner& one, const ProjectionShape& p) {
        return std::optional(weight(one, p, *read));
      });
    for (const auto& [product, tensors, read] :
         {std::tuple{&gate_up, &of_gate_up, &read_gate_up}, {&down, &of_down, &read_down}})
      visit_all(*product, *tensors, [&, read = read](const Owner& one, const ProjectionShape& p) {
        return p.bias ? std::optional(bias(one, p, *read)) : std::nullopt;
      });
    const bool both = gate_up.low_rank() > 0 && down.low_rank() > 0;
    for (const ProductShape* const product : {&gate_up, &down}) {
      const std::string module =
          prefix_ + module_name(names.experts) + (both && product == &gate_up ? ".base_layer" : "");
      each(*product, [&](const Owner& one, const ProjectionShape& p, std::int64_t) { a_of_expert(one, p, module); });
      each(*product, [&](const Owner& one, const ProjectionShape& p, std::int64_t i) {
        b_of_expert(one, p, module, i, static_cast<std::int64_t>(product->parts.size()));
      });
    }
    for (const ProductShape* const product : {&gate_up, &down})
      for (const ProjectionShape& p : product->parts)
        for (std::int64_t e = 0; e < shape_.experts; ++e) pair({expert_prefix(shape_, layer_, e), e}, p);
  }

 private:
  // The prefix of a module's names, and the expert's number.
  struct Owner {
    std::string prefix;
    std::int64_t expert = -1;
  };

  // A tensor that is its parts, one behind the other.
  struct Rows {
    std::string tensor = {};  // "": every part is a tensor of its own
    std::int64_t outputs = 0, next = 0;

    void place(ParameterShape& p) {
      if (tensor.empty()) return;
      const std::int64_t rows = p.sides[0].size, columns = p.sides.size() > 1 ? p.sides[1].size : 1;
      p.file = {tensor, {outputs}, rows, columns, next * columns, columns};
      if (p.sides.size() > 1) p.file.shape.push_back(columns);
      next += rows;
    }
  };

  // The tensors that are the weights, or the biases, of a product of all experts.
  class ExpertTensors {
   public:
    ExpertTensors(const Walk& walk, const ProductShape& product, const char* module, const char* name)
        : kind_(walk.shape_.names.expert_files),
          experts_(walk.shape_.experts),
          parts_(static_cast<std::int64_t>(product.parts.size())) {
      if (kind_ == ExpertFiles::each) return;
      const bool of_module = module[0] != '\0';
      const std::string own = of_module ? module : text_of(walk.shape_.names.experts, ".", name);
      weights_ = walk.file_name(walk.prefix_ + own + (of_module ? ".weight" : ""));
      biases_ = walk.file_name(walk.prefix_ + own + (of_module ? ".bias" : "_bias"));
    }

    // `number`: of the parameter's projection in the product.
    void place(ParameterShape& p, std::int64_t number) const {
      if (kind_ == ExpertFiles::each) return;
      const bool matrix = p.sides.size() > 1, interleaved = kind_ == ExpertFiles::interleaved;
      const std::int64_t rows = p.sides[0].size, columns = matrix ? p.sides[1].size : 1, outputs = parts_ * rows;
      p.file = {matrix ? weights_ : biases_, {experts_, outputs}, rows, columns, p.expert * outputs * columns};
      if (matrix) p.file.shape.insert(p.file.shape.begin() + (interleaved ? 1 : 2), columns);
      p.file.first += interleaved ? number : number * rows * columns;
      p.file.row_step = interleaved ? parts_ : columns;
      p.file.column_step = interleaved ? outputs : 1;
    }

   private:
    ExpertFiles kind_;
    std::int64_t experts_, parts_;
    std::string weights_, biases_;
  };

  ParameterShape weight(const Owner& owner, const ProjectionShape& p, const ReadTogether& read) const {
    ParameterShape out = made(owner, p.name, ".weight", {p.out, p.in}, read);
    out.of_heads = p.of_heads;
    return out;
  }
  ParameterShape bias(const Owner& owner, const ProjectionShape& p, const ReadTogether& read) const {
    ParameterShape out = made(owner, p.name, ".bias", {p.out}, read);
    out.of_heads = p.of_heads;
    return out;
  }
  // `joint`: the rows of the B of joint projections, so far.
  void addition(const ProjectionShape& p, Rows& joint) const {
    if (p.rank == 0) return;
    const Owner owner{.prefix = prefix_};
    const PairNames tensors = pair_of_module(module_name(prefix_ + (p.joint[0] == '\0' ? p.name : p.joint)));
    if (!p.shares_a) {
      ParameterShape a = row_a(owner, p);
      if (tensors.a != a.name) a.file.tensor = tensors.a;
      visits_.parameter(a);
    }
    ParameterShape b = row_b(owner, p);
    if (p.joint[0] != '\0')
      joint.tensor = tensors.b, joint.place(b);
    else if (tensors.b != b.name)
      b.file.tensor = tensors.b;
    visits_.parameter(b);
    pair(owner, p);
  }
  // Rows of each expert in turn.
  void a_of_expert(const Owner& owner, const ProjectionShape& p, const std::string& module) const {
    if (p.rank == 0 || p.shares_a) return;
    ParameterShape a = row_a(owner, p);
    Rows whole{pair_of_module(module).a, shape_.experts * p.rank, owner.expert * p.rank};
    whole.place(a);
    visits_.parameter(a);
  }
  // Column j E + e is column j of expert e; rows as in the experts' matrices.
  void b_of_expert(const Owner& owner, const ProjectionShape& p, const std::string& module, std::int64_t number,
                   std::int64_t parts) const {
    if (p.rank == 0) return;
    ParameterShape b = row_b(owner, p);
    const std::int64_t E = shape_.experts, rows = p.out.size, columns = E * p.rank;
    const bool interleaved = shape_.names.expert_files == ExpertFiles::interleaved;
    b.file = {pair_of_module(module).b, {parts * rows, columns}, rows, p.rank};
    b.file.first = number * (interleaved ? 1 : rows) * columns + owner.expert;
    b.file.row_step = (interleaved ? parts : 1) * columns, b.file.column_step = E;
    visits_.parameter(b);
  }
  void pair(const Owner& owner, const ProjectionShape& p) const {
    if (p.rank == 0) return;
    std::string module = p.joint[0] == '\0' ? p.name : p.joint, prefix = owner.prefix;
    if (owner.expert >= 0) {  // "mlp.experts.3." and "w2"
      prefix.erase(prefix.rfind('.', prefix.size() - 2) + 1);
      if (p.joint[0] == '\0') module = "down_proj";
    }
    auto [a, b] = pair_names(owner.prefix, p);
    visits_.pair({std::move(a), std::move(b), owner.prefix + p.name + ".weight", module_name(prefix + module), layer_,
                  owner.expert});
  }
  ParameterShape row_a(const Owner& owner, const ProjectionShape& p) const {
    return added(pair_names(owner.prefix, p).a, {{p.rank}, p.in}, Start::uniform, owner, p);
  }
  ParameterShape row_b(const Owner& owner, const ProjectionShape& p) const {
    return added(pair_names(owner.prefix, p).b, {p.out, {p.rank}}, Start::zero, owner, p);
  }
  ParameterShape added(std::string name, std::vector<Side> sides, Start start, const Owner& owner,
                       const ProjectionShape& p) const {
    ParameterShape out;
    out.name = std::move(name), out.sides = std::move(sides), out.layer = layer_, out.expert = owner.expert;
    out.added = true, out.start = start;
    out.in_parts = p.out.cut != Cut::none || p.in.cut != Cut::none || p.of_heads;
    return out;
  }
  ParameterShape made(const Owner& owner, const char* name, const char* kind, std::vector<Side> sides,
                      const ReadTogether& read) const {
    ParameterShape out;
    out.name = owner.prefix + name + kind, out.sides = std::move(sides);
    out.layer = layer_, out.expert = owner.expert, out.of_mixer = of_mixer(), out.read = read;
    if (!files_.same()) out.file.tensor = file_name(out.name);
    return out;
  }
  std::string file_name(const std::string& name) const { return files_.of(name, layer_, part_); }
  bool of_mixer() const { return part_ == FileNames::Of::mixer; }

  const Visits& visits_;
  const ModelShape& shape_;
  const FileNames& files_;
  FileNames::Of part_;
  std::int64_t layer_;
  std::string prefix_;
};

void visit_part(const Walk& walk, const PartParameters& part) {
  for (const PartParameters::Entry& entry : part.entries()) {
    if (!entry.products)
      walk.tensors(part.tensors()[entry.first], entry.first);
    else if (part.products()[entry.first].rows == ProductRows::chosen)
      walk.of_experts(part, entry);
    else
      walk.products(part, entry);
  }
}

void visit_layer(const ModelShape& shape, const LayerParameters& p, std::int64_t layer, const FileNames& files,
                 const Visits& visits) {
  const auto walk = [&](FileNames::Of part) { return Walk(visits, shape, files, part, layer); };
  const Walk mixer_norm = walk(FileNames::Of::mixer_norm), mlp_norm = walk(FileNames::Of::mlp_norm);
  mixer_norm.norm(p.mixer_norm);
  visit_part(walk(FileNames::Of::mixer), p.mixer);
  mixer_norm.norm(p.mixer_post_norm);
  mlp_norm.norm(p.mlp_norm);
  mlp_norm.norm(p.mlp_post_norm);
  visit_part(walk(FileNames::Of::mlp), p.mlp);
}

PartParameters dense_mlp(const ModelShape& shape, std::int64_t inner_width) {
  const ParameterNames& names = shape.names;
  const Side M{shape.hidden}, inner{inner_width, Cut::tp};
  const bool gated = shape.activation.gated;
  ProductShape gate_up{ProductRows::continuing};
  if (gated) gate_up.parts.push_back({names.gate, inner, M, shape.mlp_bias});
  gate_up.parts.push_back({names.up, inner, M, shape.mlp_bias});
  PartParameters p;
  p.add({std::move(gate_up)}, names.fused_gate_up, gated ? names.fused_gate_up : "");
  p.add({{ProductRows::continuing, {{names.down, M, inner, shape.mlp_bias}}}});
  ProductShape input_gate{ProductRows::continuing}, input_projection{ProductRows::continuing};
  TensorRow input_norm;
  if (const Side P{shape.layer_inputs.width}; P.size > 0) {
    input_gate.parts = {{"per_layer_input_gate", P, M}};
    input_projection.parts = {{"per_layer_projection", M, P}};
    input_norm.parts = {{"post_per_layer_input_norm.weight", {M}}};
  }
  p.add({std::move(input_gate)});
  p.add({std::move(input_projection)});
  p.add(std::move(input_norm));
  return p;
}

PartParameters expert_mlp(const ModelShape& shape) {
  const ParameterNames& names = shape.names;
  const Side M{shape.hidden}, inner{shape.expert_inner, Cut::experts}, shared{shape.shared_expert.inner, Cut::tp};
  const bool gated = shape.activation.gated, bias = shape.expert_bias;
  const auto gate_and_up = [&](ProductRows rows, const ProjectionShape& gate, const ProjectionShape& up) {
    ProductShape out{rows};
    if (gated) out.parts.push_back(gate);
    out.parts.push_back(up);
    return out;
  };
  PartParameters p;
  p.add({{ProductRows::continuing, {{names.router, {shape.experts}, M, shape.router.bias}}}});
  TensorRow correction{.trains = false};
  if (shape.router.correction_bias) correction.parts = {{names.correction_bias, {{shape.experts}}}};
  p.add(std::move(correction));
  const auto vector_of = [&](bool exists, const char* name, std::int64_t width) {
    TensorRow row;
    if (exists) row.parts = {{name, {{width}}}};
    p.add(std::move(row));
  };
  const bool apart = shape.shared_expert.apart;
  vector_of(apart, names.router_scale, shape.hidden);
  vector_of(shape.router.expert_scale, names.expert_scale, shape.experts);
  vector_of(apart, names.expert_norm, shape.hidden);
  vector_of(apart, names.shared_post_norm, shape.hidden);
  vector_of(apart, names.expert_post_norm, shape.hidden);
  p.add({gate_and_up(ProductRows::chosen, {names.expert_gate, inner, M, bias}, {names.expert_up, inner, M, bias})}, "",
        gated ? "gate_up_proj" : "");
  p.add({{ProductRows::chosen, {{names.expert_down, M, inner, bias}}}});
  if (shape.shared_expert.inner == 0) {
    p.add({{ProductRows::continuing}, {ProductRows::continuing}, {ProductRows::continuing}});
    return p;
  }
  p.add({gate_and_up(ProductRows::continuing, {names.shared_gate, shared, M}, {names.shared_up, shared, M})},
        names.fused_shared);
  p.add({{ProductRows::continuing, {{names.shared_down, M, shared}}}});
  ProductShape gate{ProductRows::continuing};
  if (shape.shared_expert.gate) gate.parts = {{names.shared_expert_gate, {1}, M}};
  p.add({std::move(gate)});
  return p;
}

PartParameters mlp_parameters(const ModelShape& shape, const LayerShape& layer) {
  if (layer.mlp == MlpKind::none) return {};
  return layer.has_experts() ? expert_mlp(shape) : dense_mlp(shape, layer.inner);
}

}  // namespace

LayerParameters layer_parameters(const ModelShape& shape, const LayerShape& layer) {
  const ParameterNames& names = shape.names;
  const std::int64_t pre = layer.has_norms_before() ? shape.hidden : 0,
                     post = layer.has_norms_after() ? shape.hidden : 0;
  const bool norm_bias = shape.norm == NormKind::layer, mlp = layer.mlp != MlpKind::none;
  LayerParameters p;
  p.mixer_norm = {names.attention_norm, pre, norm_bias};
  p.mixer_post_norm = {names.attention_post_norm, post};
  if (mlp) p.mlp_norm = {names.mlp_norm, pre, norm_bias};
  if (mlp) p.mlp_post_norm = {names.mlp_post_norm, post};
  p.mixer = layer.mixer->parameters(shape.hidden);
  p.mlp = mlp_parameters(shape, layer);
  p.experts = layer.has_experts() ? shape.experts : 0;
  const std::int64_t rank = shape.trained.added.rank;
  for_each_projection(p, layer.adapted,
                      [&](ProjectionShape& projection, const ProductShape&, std::uint32_t bits, std::uint32_t bit) {
                        projection.rank = (bits & bit) != 0 ? rank : 0;
                      });
  return p;
}

std::int64_t LayerParameters::parameters() const {
  std::int64_t sum = mixer_norm.parameters() + mixer_post_norm.parameters() + mlp_norm.parameters() +
                     mlp_post_norm.parameters() + mixer.tensor_parameters() + mlp.tensor_parameters();
  for (const PartParameters* const part : {&mixer, &mlp})
    for (const ProductShape& product : part->products())
      sum += (product.rows == ProductRows::chosen ? experts : 1) * product.parameters();
  return sum;
}

std::int64_t LayerParameters::low_rank() const {
  std::int64_t sum = 0;
  for (const PartParameters* const part : {&mixer, &mlp})
    for (const ProductRows rows : {ProductRows::all, ProductRows::continuing})
      sum += part->sum(rows, [](const ProductShape& product) { return product.low_rank(); });
  return sum;
}
std::int64_t LayerParameters::expert_low_rank() const {
  return mlp.sum(ProductRows::chosen, [](const ProductShape& product) { return product.low_rank(); });
}

std::string layer_prefix(std::int64_t layer) { return "model.layers." + std::to_string(layer) + "."; }
std::string module_name(const std::string& name) {
  constexpr std::string_view kNames[][2] = {{"block_sparse_moe.", "mlp."},
                                            {"attention.dense", "self_attn.o_proj"},
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
  const Side M{shape.hidden}, vocabulary{shape.vocabulary, Cut::tp};
  OuterParameters p;
  p.embedding = {"model.embed_tokens", vocabulary, M};
  p.final_norm = {shape.names.final_norm, shape.hidden, shape.norm == NormKind::layer};
  p.head = {"lm_head", vocabulary, M};
  if (const LayerInputs& inputs = shape.layer_inputs; inputs.width > 0) {
    const Side W{inputs.width * shape.layers()};
    p.layer_embedding = {"model.embed_tokens_per_layer", {inputs.vocabulary, Cut::tp}, W};
    const Additions& added = shape.trained.added;
    p.layer_projection = {"model.per_layer_model_projection", W, M, false, added.layer_inputs ? added.rank : 0};
    p.layer_projection_norm = {"model.per_layer_projection_norm", inputs.width};
  }
  if (shape.tied_head) p.head = {"lm_head", {}, M};
  if (shape.value_head) p.head = {"score", {1}, M, true};
  return p;
}

bool of_layer_inputs(const OuterParameters& outer, const std::string& parameter) {
  if (outer.layer_projection_norm.width == 0) return false;
  const std::array names{outer.layer_embedding.name, outer.layer_projection.name, outer.layer_projection_norm.name};
  return std::ranges::any_of(names, [&](const char* name) { return parameter.starts_with(text_of(name, ".")); });
}

ProjectionShape adapted_head(const ModelShape& shape) {
  const Additions& added = shape.trained.added;
  return {"lm_head", {shape.vocabulary, Cut::tp}, {shape.hidden}, false, added.head ? added.rank : 0};
}

TrainedWeights trained_weights(const ModelShape& shape) {
  TrainedWeights sum;
  for (const LayerShape& layer : shape.layer) {
    const LayerParameters p = layer_parameters(shape, layer);
    sum.layers += p.low_rank();
    sum.experts += p.experts * p.expert_low_rank();
    for (const auto& [part, trains] : {std::pair{&p.mixer, layer.trains.mixer}, {&p.mlp, layer.trains.mlp}})
      for (std::size_t i = 0; i < part->products().size(); ++i) {
        if ((trains >> i & 1) == 0) continue;
        const ProductShape& product = part->products()[i];
        if (product.rows == ProductRows::chosen)
          sum.experts += p.experts * product.weights();
        else
          sum.layers += product.weights();
      }
  }
  return sum;
}

namespace {

void for_each_shape(const ModelShape& shape, const Visits& visits) {
  const OuterParameters outer = outer_parameters(shape);
  const FileNames files(shape);
  const Walk walk(visits, shape, files, FileNames::Of::outer);
  walk.outer(outer.embedding);
  walk.outer(outer.layer_embedding);
  walk.outer(outer.layer_projection);
  walk.addition(outer.layer_projection);
  walk.norm(outer.layer_projection_norm);
  for (std::int64_t layer = 0; layer < shape.layers(); ++layer)
    visit_layer(shape, layer_parameters(shape, shape.at(layer)), layer, files, visits);
  walk.norm(outer.final_norm);
  walk.outer(outer.head);
  walk.addition(adapted_head(shape));
}

}  // namespace

bool is_read_by_products(const ModelShape& shape, const ParameterShape& p) {
  return p.sides.size() == 2 && p.name.ends_with(".weight") && !p.added &&
         (p.expert >= 0 || p.name.find(text_of(".", shape.names.router, ".")) == p.name.npos);
}

void for_each_parameter(const ModelShape& shape, const std::function<void(const ParameterShape&)>& visit) {
  if (shape.trained.all()) return for_each_shape(shape, {.parameter = visit});
  std::size_t index = 0;
  const auto named_visit = [&](const ParameterShape& parameter) {
    ParameterShape named = parameter;
    const TrainedParameters& trained = shape.trained;
    named.quantised = trained.quantised_parameters && trained.quantised_parameters->at(index);
    named.mapped = trained.mapped_parameters && trained.mapped_parameters->at(index);
    named.trains = trained.of_parameter->at(index++);
    named.narrow = trained.narrow && !named.trains && !named.quantised && is_read_by_products(shape, named);
    visit(named);
  };
  for_each_shape(shape, {.parameter = named_visit});
}

std::vector<AddedPair> added_pairs(const ModelShape& shape) {
  std::vector<AddedPair> out;
  for_each_shape(shape, {.pair = [&](const AddedPair& pair) { out.push_back(pair); }});
  return out;
}

std::int64_t ModelShape::parameters() const {
  const OuterParameters outer = outer_parameters(*this);
  std::int64_t total = outer.embedding.parameters() + outer.layer_embedding.parameters() +
                       outer.layer_projection.parameters() + outer.layer_projection.low_rank() +
                       outer.layer_projection_norm.parameters() + outer.final_norm.parameters() +
                       outer.head.parameters() + adapted_head(*this).low_rank();
  for (const LayerShape& one : layer) {
    const LayerParameters p = layer_parameters(*this, one);
    total += p.parameters() + p.low_rank() + p.experts * p.expert_low_rank();
  }
  return total;
}

std::int64_t ModelShape::expert_layers_before(std::int64_t number) const {
  return std::count_if(layer.begin(), layer.begin() + number, std::mem_fn(&LayerShape::has_experts));
}

std::int64_t ModelShape::window() const {
  std::int64_t most = 0;
  for (const LayerShape& one : layer) most = std::max(most, one.mixer->window());
  return most;
}

std::int64_t ModelShape::states_before(std::int64_t number) const {
  std::int64_t total = 0;
  for (std::int64_t i = 0; i < number; ++i) total += mixer(i).state();
  return total;
}

}  // namespace espalier
