#include "espalier/ops/products.h"

#include <ATen/ATen.h>

#include "espalier/ops/cpu/dispatch.h"
#include "espalier/ops/cpu/row_kernels.h"

namespace espalier {
namespace {

void add_bias_in_place(const at::Tensor& out_RN, const at::Tensor& bias_N) {
  if (!bias_N.defined()) return;
  dispatch(out_RN.scalar_type(), [&]<class T>() {
    rows::add_bias<T>(out_RN.size(0), out_RN.size(1), pointer<T>(bias_N), pointer<T>(out_RN));
  });
}

}  // namespace

void linear(const at::Tensor& out_RN, const at::Tensor& x_RK, const at::Tensor& weight_NK, const at::Tensor& bias_N,
            Timer* timer) {
  const TimedPart timed(timer, part::kProducts);
  at::Tensor out = out_RN;
  at::mm_out(out, x_RK, weight_NK.t());
  add_bias_in_place(out, bias_N);
}

void linear_onto(const at::Tensor& out_RN, const at::Tensor& base_RN, const at::Tensor& x_RK,
                 const at::Tensor& weight_NK, const at::Tensor& bias_N, Timer* timer) {
  const TimedPart timed(timer, part::kProducts);
  at::Tensor out = out_RN;
  at::addmm_out(out, base_RN, x_RK, weight_NK.t());
  add_bias_in_place(out, bias_N);
}

void compute_linear_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN, const at::Tensor& weight_NK,
                               Timer* timer) {
  const TimedPart timed(timer, part::kProducts);
  at::Tensor grad_x = grad_x_RK;
  at::mm_out(grad_x, grad_RN, weight_NK);
}

void add_linear_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN, const at::Tensor& weight_NK,
                           Timer* timer) {
  const TimedPart timed(timer, part::kProducts);
  at::Tensor grad_x = grad_x_RK;
  at::addmm_out(grad_x, grad_x, grad_RN, weight_NK);
}

void add_linear_grad_weight(const at::Tensor& grad_weight_NK, const at::Tensor& grad_bias_N, const at::Tensor& grad_RN,
                            const at::Tensor& x_RK, Arena& arena, Timer* timer) {
  const TimedPart timed(timer, part::kProducts);
  at::Tensor grad_weight = grad_weight_NK;
  if (grad_weight.scalar_type() == grad_RN.scalar_type()) {
    at::addmm_out(grad_weight, grad_weight, grad_RN.t(), x_RK);
  } else {
    const ArenaScope scope(arena);
    at::Tensor product = arena.take(grad_weight.sizes(), grad_RN.scalar_type());
    at::mm_out(product, grad_RN.t(), x_RK);
    rows::add(product.numel(), pointer<bfloat16>(product), pointer<float>(grad_weight));
  }
  if (!grad_bias_N.defined()) return;
  dispatch(grad_RN.scalar_type(), [&]<class T>() {
    rows::add_column_sums<T>(grad_RN.size(0), grad_RN.size(1), pointer<T>(grad_RN), grad_RN.size(1),
                             pointer<accumulator_t<T>>(grad_bias_N));
  });
}

}  // namespace espalier
