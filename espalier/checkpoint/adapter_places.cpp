#include "espalier/checkpoint/adapter_places.h"

#include "espalier/shape/parameter_shapes.h"

namespace espalier {

std::map<std::string, FilePlace> adapter_places(const ModelShape& shape) {
  std::map<std::string, FilePlace> places;
  for_each_parameter(shape, [&](const ParameterShape& p) {
    if (!p.added) return;
    FilePlace& place = places.emplace(p.name, p.file).first->second;
    if (place.tensor.empty()) place.tensor = p.name;
    if (place.is_part()) return;
    place.rows = p.sides[0].size, place.columns = place.row_step = p.sides[1].size;
    place.shape = {place.rows, place.columns};
  });
  return places;
}

std::string saved_module(const std::string& tensor) {
  const bool of_module =
      tensor.ends_with(".weight") || tensor.ends_with(".bias") || tensor.find(".experts.") != tensor.npos;
  return of_module ? tensor.substr(0, tensor.rfind('.')) : tensor;
}

}  // namespace espalier
