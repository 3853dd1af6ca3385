#include "espalier/checkpoint/adapter_places.h"

#include <string_view>

namespace espalier {
namespace {

constexpr std::string_view kA = ".lora_A.weight", kB = ".lora_B.weight";

std::string without(const std::string& name, std::string_view ending) {
  return name.substr(0, name.size() - ending.size());
}

struct Sizes {
  std::int64_t rows, columns;
};

class Places {
 public:
  explicit Places(const ModelShape& shape) : shape_(shape) {
    for_each_parameter(shape, [&](const ParameterShape& p) {
      if (p.low_rank) sizes_[p.name] = {p.sides[0].size, p.sides[1].size};
    });
    for (const AdapterPart& part : adapter_parts(shape)) part.expert >= 0 ? add_of_expert(part) : add(part);
    for (auto& [name, place] : places_)
      if (place.tensor_rows == 0) place.tensor_rows = rows_of_[place.tensor];
  }
  std::map<std::string, AdapterPlace> take() { return std::move(places_); }

 private:
  // True if both parameters of a layer's experts have adapters.
  bool has_both(std::int64_t layer) const {
    const LayerParameters p = layer_parameters(shape_, shape_.at(layer));
    return p.mlp.products()[ExpertProductNumbers::gate_up].low_rank() > 0 &&
           p.mlp.products()[ExpertProductNumbers::down].low_rank() > 0;
  }
  AdapterPlace& start(const std::string& name, const std::string& tensor) {
    const Sizes size = sizes_.at(name);
    AdapterPlace& place = places_[name];
    place.tensor = tensor;
    place.rows = size.rows, place.columns = place.tensor_columns = size.columns;
    return place;
  }

  // The Bs of one A stand one behind the other.
  void add(const AdapterPart& part) {
    const std::string module = module_name(without(part.a, kA));
    if (!places_.contains(part.a)) start(part.a, module + std::string(kA)).tensor_rows = sizes_.at(part.a).rows;
    AdapterPlace& b = start(part.b, module + std::string(kB));
    b.first_row = rows_of_[b.tensor];
    rows_of_[b.tensor] += b.rows;
  }

  void add_of_expert(const AdapterPart& part) {
    const std::int64_t E = shape_.experts;
    const ParameterNames& names = shape_.names;
    const bool down = part.a == without(part.b, kB) + std::string(kA), inner = !down && has_both(part.layer);
    const std::string module = layer_prefix(part.layer) + module_name(names.experts) + (inner ? ".base_layer" : "");
    if (!places_.contains(part.a)) {
      AdapterPlace& a = start(part.a, module + std::string(kA));
      a.first_row = part.expert * a.rows, a.tensor_rows = E * a.rows;
    }
    AdapterPlace& b = start(part.b, module + std::string(kB));
    b.first_column = part.expert, b.column_step = E, b.tensor_columns = E * b.columns;
    b.tensor_rows = down ? b.rows : 2 * b.rows;
    if (down) return;
    const bool up = part.weight.ends_with(std::string(".") + names.expert_up + ".weight");
    if (names.packed_experts)
      b.first_row = up ? 1 : 0, b.row_step = 2;
    else
      b.first_row = up ? b.rows : 0;
  }

  const ModelShape& shape_;
  std::map<std::string, Sizes> sizes_;
  std::map<std::string, std::int64_t> rows_of_;  // so far, of the tensors of joint Bs
  std::map<std::string, AdapterPlace> places_;
};

}  // namespace

std::map<std::string, AdapterPlace> adapter_places(const ModelShape& shape) { return Places(shape).take(); }

ModelShape with_every_adapter(ModelShape shape, std::int64_t rank) {
  shape.trained = {};
  shape.trained.adapter.rank = rank;
  shape.trained.adapter.head = !shape.value_head;
  constexpr std::uint32_t kAll = ~std::uint32_t{0};
  const AdaptedLayer every = takes_adapters(shape) ? AdaptedLayer{kAll, kAll} : AdaptedLayer{};
  set_adapters(shape, std::vector<AdaptedLayer>(shape.layer.size(), every));
  return shape;
}

}  // namespace espalier
