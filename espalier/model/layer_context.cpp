#include "espalier/model/layer_context.h"

#include "espalier/device/scalar_type.h"

namespace espalier {

BlockShape LayerContext::block() const { return {shape, element_bytes(dtype()), ops.rounds_weight_gradients(dtype())}; }

BlockRows LayerContext::block_rows() const {
  return {rows.rows(), last ? rows.outputs() : rows.rows(), last, rows.in_path, weights.router.weight.defined()};
}

}  // namespace espalier
