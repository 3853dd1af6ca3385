#include "espalier/model/kv_path.h"

#include <ATen/ATen.h>

#include "espalier/base/error.h"
#include "espalier/device/scalar_type.h"
#include "espalier/ops/operations.h"

namespace espalier {

KvPath::KvPath(const ModelShape& shape, std::int64_t capacity, at::ScalarType dtype, bool with_gradients, Arena& arena)
    : device_(arena.device()), capacity_(capacity), layers_(static_cast<std::size_t>(shape.layers)) {
  const std::int64_t sizes[] = {capacity, shape.kv_heads, shape.head_dim};
  for (Layer& layer : layers_) {
    layer.k = arena.take(sizes, dtype);
    layer.v = arena.take(sizes, dtype);
    if (!with_gradients) continue;
    layer.grad_k = arena.take(sizes, accumulator_type(dtype));
    layer.grad_v = arena.take(sizes, accumulator_type(dtype));
  }
}

void KvPath::push(std::int64_t rows, std::int64_t contributions) {
  ESPALIER_INTERNAL(rows_ + rows <= capacity_, rows_, " + ", rows, " rows on a path of ", capacity_);
  trunks_.push_back({rows_, rows_ + rows, contributions, std::vector<std::int64_t>(layers_.size(), 0)});
  rows_ += rows;
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    const Layer own = top(static_cast<std::int64_t>(layer));
    if (own.grad_k.defined()) {
      device_.operations().zero(own.grad_k);
      device_.operations().zero(own.grad_v);
    }
  }
}

void KvPath::pop() {
  ESPALIER_INTERNAL(!trunks_.empty());
  rows_ = trunks_.back().begin;
  trunks_.pop_back();
}

KvPath::Layer KvPath::slice(std::int64_t layer, std::int64_t begin, std::int64_t end) const {
  const Layer& whole = layers_.at(static_cast<std::size_t>(layer));
  auto rows = [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.narrow(0, begin, end - begin) : tensor;
  };
  return {rows(whole.k), rows(whole.v), rows(whole.grad_k), rows(whole.grad_v)};
}

KvPath::Layer KvPath::path(std::int64_t layer, std::int64_t rows) const { return slice(layer, 0, rows); }
KvPath::Layer KvPath::top(std::int64_t layer) const { return slice(layer, trunks_.back().begin, trunks_.back().end); }

void KvPath::count_contribution(std::int64_t layer, std::int64_t rows) {
  for (Trunk& trunk : trunks_) {
    if (trunk.end > rows) break;
    std::int64_t& arrived = trunk.arrived.at(static_cast<std::size_t>(layer));
    ++arrived;
    ESPALIER_INTERNAL(arrived <= trunk.expected, "layer ", layer, ": contribution ", arrived, " of ", trunk.expected);
  }
}

void KvPath::expect_complete(std::int64_t layer) const {
  const Trunk& trunk = trunks_.back();
  ESPALIER_INTERNAL_EQ(trunk.arrived.at(static_cast<std::size_t>(layer)), trunk.expected,
                       "gradient contributions of layer ", layer);
}

}  // namespace espalier
