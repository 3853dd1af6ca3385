#include "espalier/model/parameters.h"

#include <algorithm>
#include <cstddef>
#include <optional>

#include "espalier/base/error.h"

namespace espalier {

std::vector<std::int64_t> Parameter::whole_shape() const {
  std::vector<std::int64_t> whole = shape;
  if (shard.dim >= 0) whole[static_cast<std::size_t>(shard.dim)] = shard.whole;
  return whole;
}

std::vector<std::int64_t> Parameter::buffer_shape() const {
  return quantised_row > 0 ? std::vector<std::int64_t>{shape[0], quantised_row} : shape;
}

// One run of all rows, or one of each row; of each range.
std::vector<ShardRun> runs_of(const Parameter& parameter) {
  const Shard& shard = parameter.shard;
  if (shard.dim < 0) return {{0, 0, parameter.count}};
  std::int64_t runs = 1, width = 1;
  for (std::size_t dim = 0; dim < parameter.shape.size(); ++dim)
    if (static_cast<int>(dim) != shard.dim) (static_cast<int>(dim) < shard.dim ? runs : width) *= parameter.shape[dim];
  std::vector<ShardRun> out;
  for (std::int64_t run = 0; run < runs; ++run) {
    std::int64_t local = run * shard.local;
    for (const Shard::Range& range : shard.ranges()) {
      out.push_back({(run * shard.whole + range.begin) * width, local * width, (range.end - range.begin) * width});
      local += range.end - range.begin;
    }
  }
  return out;
}

std::vector<ShardRun> runs_of(const Parameter& parameter, const Kept& kept) {
  std::vector<ShardRun> out;
  for (const ShardRun& run : runs_of(parameter)) {
    const std::int64_t begin = std::max(run.local, kept.first),
                       end = std::min(run.local + run.count, kept.first + kept.count);
    if (begin < end) out.push_back({run.whole + begin - run.local, kept.place + begin - kept.first, end - begin});
  }
  return out;
}

ParameterTable::ParameterTable(const LocalShape& shape, Parameters which) : sharded_(shape.degrees().full) {
  for_each_parameter(shape.whole(), [&](const ParameterShape& parameter) {
    const std::optional<Shard> shard = shape.shard(parameter);
    if (shard && belongs(parameter, which))
      add(parameter, *shard, which == Parameters::quantised ? shape.whole().trained.quantised_form : quantised::Form());
    else
      elsewhere_.insert(parameter.name);
  });
  if (sharded_) units_ = units_of(shape, which);
}

const Unit* ParameterTable::unit_of(const Parameter& parameter) const {
  return sharded() ? &units_.at(parameter.offset) : nullptr;
}

Kept ParameterTable::kept(const Parameter& parameter) const {
  const Unit* const unit = unit_of(parameter);
  return unit == nullptr ? Kept{0, parameter.count, parameter.offset} : kept(parameter, unit->rank);
}

Kept ParameterTable::kept(const Parameter& parameter, std::int64_t rank) const {
  return unit_of(parameter)->kept(parameter.offset, parameter.count, rank);
}

const Parameter* ParameterTable::find(const std::string& name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &parameters_[found->second];
}

const Parameter& ParameterTable::at(const std::string& name) const {
  const Parameter* const found = find(name);
  ESPALIER_INTERNAL(found != nullptr, "no parameter '", name, "'");
  return *found;
}

void ParameterTable::add(const ParameterShape& whole, const Shard& shard, const quantised::Form& form) {
  Parameter parameter{whole.name, {}, size_, 1, shard, whole.file, whole.added, whole.start};
  for (const Side& side : whole.sides) parameter.shape.push_back(side.size);
  if (shard.dim >= 0) parameter.shape[static_cast<std::size_t>(shard.dim)] = shard.local;
  if (form.kind != quantised::Kind::none) parameter.quantised_row = quantised::row_bytes(form, parameter.shape[1]);
  for (const std::int64_t size : parameter.buffer_shape()) {
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
