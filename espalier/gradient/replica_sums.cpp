#include "espalier/gradient/replica_sums.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "espalier/model/gathered_weights.h"

namespace espalier {
namespace {

// A backward's: head, final norm, layers from the last to the first, embedding.
std::tuple<int, std::int64_t> place_in_backward(const Unit& unit) {
  if (unit.what == Unit::kEmbedding) return {2, 0};
  return unit.what >= 0 ? std::tuple{1, -unit.what} : std::tuple{0, unit.what};
}

}  // namespace

ReplicaSums::ReplicaSums(const LocalShape& shape, at::Tensor flat, const Mesh& mesh)
    : flat_(std::move(flat)), mesh_(mesh), units_(units_of(shape, Parameters::trained).all) {
  std::ranges::stable_sort(units_, {}, place_in_backward);
}

// Head and embedding may be one: they are left to those behind them, which end later.
void ReplicaSums::leave(const Stop& stop) {
  if (!last_ || stop.kind == Stop::Kind::head || stop.kind == Stop::Kind::embedding) return;
  const auto behind =
      std::ranges::find_if(units_.rbegin(), units_.rend(), [&](const Unit& unit) { return unit.what == stop.unit; });
  start_upto(static_cast<std::size_t>(units_.rend() - behind));
}

void ReplicaSums::start_upto(std::size_t end) {
  const std::int64_t most = kBucketBytes / static_cast<std::int64_t>(flat_.element_size());
  for (; next_ < end; ++next_) {
    const Unit& unit = units_[next_];
    Group& holders = holders_of(unit, mesh_);
    const std::int64_t before = holders.bytes();
    for (std::int64_t begin = 0; begin < unit.count; begin += most) {
      const at::Tensor bucket = flat_.narrow(0, unit.begin + begin, std::min(most, unit.count - begin));
      under_way_.push_back(holders.start_add(bucket, "gradient of " + name_of(unit)));
    }
    given_ += holders.bytes() - before;
  }
}

void ReplicaSums::finish() {
  start_upto(units_.size());
  for (Pending& sum : under_way_) sum.wait();
  under_way_.clear();
  next_ = 0, given_ = 0, last_ = false;
}

}  // namespace espalier
