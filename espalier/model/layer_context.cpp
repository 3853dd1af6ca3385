#include "espalier/model/layer_context.h"

#include "espalier/device/scalar_type.h"

namespace espalier {

BlockShape LayerContext::block() const {
  return {{shape, element_bytes(dtype()), ops.rounds_weight_gradients(dtype())}, own};
}

BlockRows LayerContext::block_rows() const {
  BlockRows out{.all = rows(), .continuing = continuing()};
  out.narrow = narrow;
  out.in_path = kv.keeps(layer);
  out.states = kv.states();
  out.sharded = kv.divides();
  return out;
}

at::Tensor LayerContext::continuing_rows(const at::Tensor& x_TM, const at::Tensor& x_RM) const {
  if (!narrow) return x_TM;
  ops.gather(x_TM, input.output_row_O, x_RM);
  return x_RM;
}

at::Tensor LayerContext::mixer_input(const LayerSaved& saved, const at::Tensor& room_TM) const {
  if (!has_norms_before()) return saved.stream_in_TM;
  ops.norm(saved.stream_in_TM, mixer_norm(weights), shape.rms_norm_eps, room_TM, saved.norm_rstd_T);
  return room_TM;
}

at::Tensor LayerContext::mixer_input_again(const LayerSaved& saved, const at::Tensor& room_TM, bool needed) const {
  if (!has_norms_before()) return saved.stream_in_TM;
  if (needed) ops.norm_again(saved.stream_in_TM, mixer_norm(weights), saved.norm_rstd_T, room_TM);
  return room_TM;
}

}  // namespace espalier
