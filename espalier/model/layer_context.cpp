#include "espalier/model/layer_context.h"

#include "espalier/device/scalar_type.h"

namespace espalier {

BlockShape LayerContext::block() const { return {shape, element_bytes(dtype()), ops.rounds_weight_gradients(dtype())}; }

BlockRows LayerContext::block_rows() const {
  return {input.rows(), narrow ? input.outputs() : input.rows(), narrow, kv.keeps(), weights.router.weight.defined()};
}

}  // namespace espalier
