// The matrix products of a block, written so that sums land where they are kept.
//
// Their time goes to part::kProducts of a timer, where there is one.
// Shapes: R rows, N outputs, K inputs. Weights are [N, K] as Hugging Face stores them.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/device/arena.h"
#include "espalier/observe/timer.h"

namespace espalier {

// out_RN = x_RK weight_NK^T + bias_N (bias may be undefined). Overwrites out.
void linear(const at::Tensor& out_RN, const at::Tensor& x_RK, const at::Tensor& weight_NK, const at::Tensor& bias_N,
            Timer* timer = nullptr);

// out_RN = base_RN + x_RK weight_NK^T + bias_N. Overwrites out, which may be base.
void linear_onto(const at::Tensor& out_RN, const at::Tensor& base_RN, const at::Tensor& x_RK,
                 const at::Tensor& weight_NK, const at::Tensor& bias_N, Timer* timer = nullptr);

// grad_x_RK = grad_RN weight_NK. Overwrites grad_x.
void compute_linear_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN, const at::Tensor& weight_NK,
                               Timer* timer = nullptr);
// grad_x_RK += grad_RN weight_NK.
void add_linear_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN, const at::Tensor& weight_NK,
                           Timer* timer = nullptr);

// grad_weight_NK += grad_RN^T x_RK and grad_bias_N += column sums of grad (grad_bias may be undefined), in the
// accumulator dtype. In bfloat16 the product of one set of rows is rounded once before it is added, but not where
// products are widened (cpu/widened_products.h).
void add_linear_grad_weight(const at::Tensor& grad_weight_NK, const at::Tensor& grad_bias_N, const at::Tensor& grad_RN,
                            const at::Tensor& x_RK, Arena& arena, Timer* timer = nullptr);

}  // namespace espalier
