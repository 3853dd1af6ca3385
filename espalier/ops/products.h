// Matrix products that add directly into their destination.
//
// Shapes: R rows, N outputs, K inputs. Weights are [N, K], as in Hugging Face. Bias may be undefined. On a CPU a weight
// may be bfloat16 if rows and results are float32: results are bitwise identical to those with a float32 weight. It may
// be quantised rows of bytes (base/quantised_rows.h): results are those with their numbers, in the dtype of the rows.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace espalier {

struct ProductOperations {
  // out = x weight^T + bias. Overwrites out.
  void (*linear)(const at::Tensor& out_RN, const at::Tensor& x_RK, const at::Tensor& weight_NK,
                 const at::Tensor& bias_N);
  // out = base + x weight^T + bias. Overwrites out, which may be base.
  void (*linear_onto)(const at::Tensor& out_RN, const at::Tensor& base_RN, const at::Tensor& x_RK,
                      const at::Tensor& weight_NK, const at::Tensor& bias_N);
  // grad_x = grad weight. Overwrites grad_x.
  void (*linear_grad_input)(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN, const at::Tensor& weight_NK);
  // grad_x += grad weight.
  void (*add_linear_grad_input)(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN, const at::Tensor& weight_NK);
  // True if linear and linear_grad_input of bfloat16 factors may write float32 results.
  bool writes_sums;
  // True if products of this dtype are rounded to it before they are added to a gradient in the accumulator dtype.
  bool (*rounds_weight_gradients)(at::ScalarType dtype);
  // grad_weight += grad^T x and grad_bias += column sums of grad, in the accumulator dtype; grad_weight may also have
  // the dtype of grad and x. If it has not and products are rounded, product_NK (dtype of grad and x) is overwritten
  // with them. The weight or bias has no gradient if its tensor is undefined.
  void (*add_linear_grad_weight)(const at::Tensor& grad_weight_NK, const at::Tensor& grad_bias_N,
                                 const at::Tensor& grad_RN, const at::Tensor& x_RK, const at::Tensor& product_NK);
  // Holds the weights, and copies of them packed for the kernels of `linear` and `linear_onto`, until the result is
  // destroyed. Returns null if that saves no time or the copies would exceed `most_bytes`. For few rows of `dtype` at a
  // time (sampling). The weights must not change meanwhile; views of a weight are not recognised. Quantised weights
  // are left out. Results stay bitwise identical.
  std::shared_ptr<void> (*hold_weights)(const std::vector<at::Tensor>& weights_NK, at::ScalarType dtype,
                                        std::int64_t most_bytes);
};

}  // namespace espalier
