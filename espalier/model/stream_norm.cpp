#include "espalier/model/stream_norm.h"

#include <ATen/ATen.h>

#include "espalier/base/mutation.h"
#include "espalier/ops/cpu/dispatch.h"
#include "espalier/ops/cpu/row_kernels.h"

namespace espalier {

void norm_forward(const at::Tensor& stream, const at::Tensor& weight, double eps, const at::Tensor& y,
                  const at::Tensor& rstd) {
  dispatch(stream.scalar_type(), [&]<class T>() {
    rows::rms_norm<T>(stream.size(0), stream.size(1), pointer<T>(stream), pointer<T>(weight), eps, pointer<T>(y),
                      pointer<accumulator_t<T>>(rstd));
  });
}

void norm_again(const at::Tensor& stream, const at::Tensor& weight, const at::Tensor& rstd, const at::Tensor& y) {
  dispatch(stream.scalar_type(), [&]<class T>() {
    rows::rms_norm_again<T>(stream.size(0), stream.size(1), pointer<T>(stream), pointer<T>(weight),
                            pointer<accumulator_t<T>>(rstd), pointer<T>(y));
  });
}

void norm_backward(const at::Tensor& stream, const at::Tensor& weight, const at::Tensor& rstd, const at::Tensor& grad_y,
                   const at::Tensor& grad_stream, const at::Tensor& grad_weight) {
  const at::Tensor into = ESPALIER_MUTATION(norm_weight_gradient_forgotten) ? grad_weight.clone() : grad_weight;
  dispatch(stream.scalar_type(), [&]<class T>() {
    rows::rms_norm_backward<T>(stream.size(0), stream.size(1), pointer<T>(stream), pointer<T>(weight),
                               pointer<accumulator_t<T>>(rstd), pointer<T>(grad_y), pointer<T>(grad_stream),
                               pointer<accumulator_t<T>>(into));
  });
}

}  // namespace espalier
