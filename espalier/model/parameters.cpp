#include "espalier/model/parameters.h"

#include <cstddef>
#include <optional>

#include "espalier/base/error.h"

namespace espalier {

std::vector<std::int64_t> Parameter::whole_shape() const {
  std::vector<std::int64_t> whole = shape;
  if (shard.dim >= 0) whole[static_cast<std::size_t>(shard.dim)] = shard.whole;
  return whole;
}

ParameterTable::ParameterTable(const LocalShape& shape) {
  for_each_parameter(shape.whole(), [&](const ParameterShape& parameter) {
    if (const std::optional<Shard> shard = shape.shard(parameter))
      add(parameter, *shard);
    else
      elsewhere_.insert(parameter.name);
  });
}

const Parameter& ParameterTable::at(const std::string& name) const {
  const auto found = index_.find(name);
  ESPALIER_INTERNAL(found != index_.end(), "no parameter '", name, "'");
  return parameters_[found->second];
}

void ParameterTable::add(const ParameterShape& whole, const Shard& shard) {
  Parameter parameter{whole.name, {}, size_, 1, shard};
  for (const Side& side : whole.sides) parameter.shape.push_back(side.size);
  if (shard.dim >= 0) parameter.shape[static_cast<std::size_t>(shard.dim)] = shard.local;
  for (const std::int64_t size : parameter.shape) {
    ESPALIER_INTERNAL(size > 0, "parameter '", whole.name, "' has a dimension of ", size);
    ESPALIER_INTERNAL(!__builtin_mul_overflow(parameter.count, size, &parameter.count), "parameter '", whole.name,
                      "' is too large");
  }
  index_.emplace(parameter.name, parameters_.size());
  size_ += parameter.count;
  parameters_.push_back(std::move(parameter));
}

ParameterValues values_of(const void* flat, std::int64_t bytes) {
  return [flat, bytes](const Parameter& parameter) {
    return static_cast<const std::byte*>(flat) + parameter.offset * bytes;
  };
}

}  // namespace espalier
