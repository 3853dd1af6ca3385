// Matrix products on a GPU: one multiplication, biases and column sums beside it.
#include "espalier/ops/cuda/columns.h"
#include "espalier/ops/cuda/operations.h"
#include "espalier/ops/cuda/products.h"
#include "espalier/ops/dispatch.h"

namespace espalier::cuda {
namespace {

void add_bias_to(const at::Tensor& out_RN, const at::Tensor& bias_N) {
  if (!bias_N.defined()) return;
  dispatch(out_RN.scalar_type(),
           [&]<class T>() { add_bias<T>(out_RN.size(0), out_RN.size(1), pointer<T>(bias_N), pointer<T>(out_RN)); });
}

void linear(const at::Tensor& out_RN, const at::Tensor& x_RK, const at::Tensor& weight_NK, const at::Tensor& bias_N) {
  multiply(out_RN, x_RK, weight_NK.t(), false);
  add_bias_to(out_RN, bias_N);
}

void linear_onto(const at::Tensor& out_RN, const at::Tensor& base_RN, const at::Tensor& x_RK,
                 const at::Tensor& weight_NK, const at::Tensor& bias_N) {
  if (out_RN.data_ptr() != base_RN.data_ptr()) moving_operations().convert(base_RN, out_RN);
  multiply(out_RN, x_RK, weight_NK.t(), true);
  add_bias_to(out_RN, bias_N);
}

void linear_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN, const at::Tensor& weight_NK) {
  multiply(grad_x_RK, grad_RN, weight_NK, false);
}

void add_linear_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN, const at::Tensor& weight_NK) {
  multiply(grad_x_RK, grad_RN, weight_NK, true);
}

bool rounds_weight_gradients(at::ScalarType) { return false; }

void add_linear_grad_weight(const at::Tensor& grad_weight_NK, const at::Tensor& grad_bias_N, const at::Tensor& grad_RN,
                            const at::Tensor& x_RK, const at::Tensor&) {
  if (grad_weight_NK.defined()) multiply(grad_weight_NK, grad_RN.t(), x_RK, true);
  if (!grad_bias_N.defined()) return;
  dispatch(grad_RN.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    add_column_sums<A>(grad_RN.size(0), grad_RN.size(1), pointer<T>(grad_RN), grad_RN.stride(0), nullptr,
                       pointer<A>(grad_bias_N));
  });
}

std::shared_ptr<void> hold_nothing(const std::vector<at::Tensor>&, at::ScalarType, std::int64_t) { return nullptr; }

}  // namespace

ProductOperations product_operations() {
  return {linear,
          linear_onto,
          linear_grad_input,
          add_linear_grad_input,
          true,
          rounds_weight_gradients,
          add_linear_grad_weight,
          hold_nothing};
}

const Operations& operations() {
  static const Operations all{norm_operations(),    rotation_operations(),   swiglu_operations(),
                              product_operations(), moving_operations(),     attention_operations(),
                              head_operations(),    expert_operations(),     optimizer_operations(),
                              choice_operations(),  delta_rule_operations(), short_convolution_operations(),
                              latent_operations(),  {require_taken}};
  return all;
}

}  // namespace espalier::cuda
