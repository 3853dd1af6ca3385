// Matrix products on a CPU, with their sums where they are kept: ATen's, or own ones where sums have a defined order.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <omp.h>

#include <algorithm>
#include <vector>

#include "espalier/base/defined_sums.h"
#include "espalier/base/quantised_rows.h"
#include "espalier/ops/cpu/compiled_products.h"
#include "espalier/ops/cpu/held_panels.h"
#include "espalier/ops/cpu/operations.h"
#include "espalier/ops/cpu/own_products.h"
#include "espalier/ops/cpu/row_kernels.h"
#include "espalier/ops/cpu/widened_products.h"
#include "espalier/ops/dispatch.h"

namespace espalier::cpu {
namespace {

// Lines are along dimension `line` of x.
template <class T>
own_products::Factor<T> factor_of(const at::Tensor& x, std::int64_t line) {
  const std::int64_t along = x.stride(1 - line), across = x.stride(line);
  if (along == 1 || x.size(1 - line) == 1) return {pointer<T>(x), across, true};
  ESPALIER_INTERNAL(across == 1 || x.size(line) == 1, "a factor that is contiguous in neither dimension");
  return {pointer<T>(x), along, false};
}

// A weight of bfloat16 beside rows of float32.
bool is_narrow(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == at::kFloat && b.scalar_type() == at::kBFloat16;
}

bool is_quantised(const at::Tensor& b) { return b.scalar_type() == at::kByte; }

// The weight of a product.
template <class T>
own_products::Factor<T> weight_of(const at::Tensor& a_RK, const at::Tensor& b_KN) {
  if (is_quantised(b_KN)) {
    const bool turned = b_KN.stride(0) == 1;
    return {nullptr, b_KN.stride(turned ? 1 : 0), turned, nullptr, nullptr, pointer<std::byte>(b_KN)};
  }
  if constexpr (std::is_same_v<T, float>)
    if (is_narrow(a_RK, b_KN)) {
      const own_products::Factor<bfloat16> narrow = factor_of<bfloat16>(b_KN, 1);
      return {nullptr, narrow.stride, narrow.steps_adjacent, nullptr, narrow.data};
    }
  return factor_of<T>(b_KN, 1);
}

template <class T, class Out>
void multiply_own(const at::Tensor& out_RN, const at::Tensor& base_RN, const at::Tensor& a_RK, const at::Tensor& b_KN) {
  const bool from_zero = !base_RN.defined();
  own_products::Factor<T> b = weight_of<T>(a_RK, b_KN);
  if (b.steps_adjacent && b.quantised == nullptr) b.panels = held_panels(b_KN, a_RK.scalar_type());
  own_products::multiply<T, Out>(
      {out_RN.size(0), out_RN.size(1), a_RK.size(1), factor_of<T>(a_RK, 0), b, pointer<Out>(base_RN),
       from_zero ? 0 : base_RN.stride(0), pointer<Out>(out_RN), out_RN.stride(0)},
      omp_get_max_threads());
}

void own_product(const at::Tensor& out, const at::Tensor& base, const at::Tensor& a, const at::Tensor& b) {
  if (out.numel() == 0) return;
  if (a.size(1) == 0) {
    base.defined() ? out.copy_(base) : out.zero_();
    return;
  }
  dispatch(a.scalar_type(), [&]<class T>() {
    out.scalar_type() == a.scalar_type() ? multiply_own<T, T>(out, base, a, b)
                                         : multiply_own<T, accumulator_t<T>>(out, base, a, b);
  });
}

// A weight in float32, until the next call; for the matrix library, which knows no products of two dtypes.
at::Tensor widened_weight(const at::Tensor& b_KN) {
  static thread_local at::Tensor room;
  if (!room.defined() || room.numel() < b_KN.numel()) room = at::empty({b_KN.numel()}, at::kFloat);
  const bool turned = b_KN.stride(1) != 1;
  const at::Tensor lines = turned ? b_KN.t() : b_KN;
  const at::Tensor out = room.narrow(0, 0, b_KN.numel()).view(lines.sizes());
  rows::convert(lines.size(0), lines.size(1), pointer<bfloat16>(lines), lines.stride(0), pointer<float>(out),
                lines.size(1));
  return turned ? out.t() : out;
}

// The numbers of a quantised weight, until the next call; for the matrix library, whose factors have one dtype.
at::Tensor unpacked_weight(const at::Tensor& b_KN, at::ScalarType dtype) {
  static thread_local at::Tensor room;
  const bool turned = b_KN.stride(1) != 1;
  const at::Tensor rows = turned ? b_KN.t() : b_KN;
  const auto* const first = pointer<std::byte>(rows);
  const std::int64_t columns = quantised::header_of(first).columns, stride = rows.stride(0),
                     count = rows.size(0) * columns;
  if (!room.defined() || room.numel() < count || room.scalar_type() != dtype) room = at::empty({count}, dtype);
  const at::Tensor out = room.narrow(0, 0, count).view({rows.size(0), columns});
  dispatch(dtype, [&]<class T>() {
    at::parallel_for(0, rows.size(0), 16, [&](std::int64_t begin, std::int64_t end) {
      std::vector<float> numbers(static_cast<std::size_t>(columns));
      for (std::int64_t n = begin; n < end; ++n) {
        quantised::row_values(first + n * stride, 0, columns, numbers.data());
        std::ranges::transform(numbers, pointer<T>(out) + n * columns, [](float x) { return static_cast<T>(x); });
      }
    });
  });
  return turned ? out.t() : out;
}

// out = base + a b; base undefined: 0. The first dimension of out and a are rows.
void multiply(const at::Tensor& out, const at::Tensor& base, const at::Tensor& a, const at::Tensor& b) {
  if (defined_sums()) return own_product(out, base, a, b);
  if (is_quantised(b)) return multiply(out, base, a, unpacked_weight(b, a.scalar_type()));
  if (is_narrow(a, b)) return multiply(out, base, a, widened_weight(b));
  if (widens_products(a.scalar_type())) return widened_product(out, base, a, b);
  if (a.scalar_type() == at::kBFloat16) return product_of_rows(out, base, a, b);
  at::Tensor into = out;
  base.defined() ? at::addmm_out(into, base, a, b) : at::mm_out(into, a, b);
}

void add_bias(const at::Tensor& out_RN, const at::Tensor& bias_N) {
  if (!bias_N.defined()) return;
  dispatch(out_RN.scalar_type(), [&]<class T>() {
    rows::add_bias<T>(out_RN.size(0), out_RN.size(1), pointer<T>(bias_N), pointer<T>(out_RN));
  });
}

void linear(const at::Tensor& out_RN, const at::Tensor& x_RK, const at::Tensor& weight_NK, const at::Tensor& bias_N) {
  multiply(out_RN, at::Tensor(), x_RK, weight_NK.t());
  add_bias(out_RN, bias_N);
}

void linear_onto(const at::Tensor& out_RN, const at::Tensor& base_RN, const at::Tensor& x_RK,
                 const at::Tensor& weight_NK, const at::Tensor& bias_N) {
  multiply(out_RN, base_RN, x_RK, weight_NK.t());
  add_bias(out_RN, bias_N);
}

void linear_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN, const at::Tensor& weight_NK) {
  multiply(grad_x_RK, at::Tensor(), grad_RN, weight_NK);
}

void add_linear_grad_input(const at::Tensor& grad_x_RK, const at::Tensor& grad_RN, const at::Tensor& weight_NK) {
  multiply(grad_x_RK, grad_x_RK, grad_RN, weight_NK);
}

bool rounds_weight_gradients(at::ScalarType dtype) {
  return dtype == at::kBFloat16 && !defined_sums() && !widens_products(dtype);
}

void add_linear_grad_weight(const at::Tensor& grad_weight_NK, const at::Tensor& grad_bias_N, const at::Tensor& grad_RN,
                            const at::Tensor& x_RK, const at::Tensor& product_NK) {
  const at::ScalarType dtype = grad_RN.scalar_type();
  if (grad_weight_NK.defined()) {
    if (grad_weight_NK.scalar_type() == dtype || !rounds_weight_gradients(dtype))
      multiply(grad_weight_NK, grad_weight_NK, grad_RN.t(), x_RK);
    else
      add_product_over_rows(grad_weight_NK, grad_RN, x_RK, product_NK);
  }
  if (!grad_bias_N.defined()) return;
  dispatch(dtype, [&]<class T>() {
    rows::add_column_sums<T>(grad_RN.size(0), grad_RN.size(1), pointer<T>(grad_RN), grad_RN.size(1),
                             pointer<accumulator_t<T>>(grad_bias_N));
  });
}

std::shared_ptr<void> hold_weights(const std::vector<at::Tensor>& weights_NK, at::ScalarType dtype,
                                   std::int64_t most_bytes) {
  return defined_sums() ? hold_panels(weights_NK, dtype, most_bytes) : nullptr;
}

}  // namespace

ProductOperations product_operations() {
  return {linear,
          linear_onto,
          linear_grad_input,
          add_linear_grad_input,
          false,
          rounds_weight_gradients,
          add_linear_grad_weight,
          hold_weights};
}

}  // namespace espalier::cpu
