#include "espalier/model/layer_context.h"

#include "espalier/device/scalar_type.h"

namespace espalier {

BlockShape LayerContext::block() const { return {shape, element_bytes(dtype()), ops.rounds_weight_gradients(dtype())}; }

BlockRows LayerContext::block_rows() const {
  BlockRows rows{input.rows(), narrow ? input.outputs() : input.rows(), narrow, kv.keeps(layer),
                 weights.router.weight.defined()};
  rows.mixer = shape.mixer_of(layer);
  rows.forks = kv.forks();
  rows.mlp = shape.has_mlp(layer);
  rows.divided = kv.divides();
  return rows;
}

at::Tensor LayerContext::continuing_rows(const at::Tensor& x_TM, const at::Tensor& x_RM) const {
  if (!narrow) return x_TM;
  ops.gather(x_TM, input.output_row_O, x_RM);
  return x_RM;
}

}  // namespace espalier
