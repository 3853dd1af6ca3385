#include "espalier/ops/cpu/compiled_products.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "espalier/ops/cpu/row_kernels.h"
#include "espalier/ops/cpu/widened_products.h"
#include "espalier/ops/dispatch.h"

namespace espalier {
namespace {

void multiply(const at::Tensor& out, const at::Tensor& base, const at::Tensor& a, const at::Tensor& b) {
  at::Tensor into = out;
  base.defined() ? at::addmm_out(into, base, a, b) : at::mm_out(into, a, b);
}

// Calls visit(first row, rows of the piece) for whole pieces of decreasing size; returns the rows that these hold.
template <class Visit>
std::int64_t for_each_whole_piece(std::int64_t rows, Visit&& visit) {
  std::int64_t row = 0;
  for (const std::int64_t size : {kPieceRows, kSmallPieceRows})
    for (; rows - row >= size; row += size) visit(row, size);
  return row;
}

// The product of the last rows, of which there are fewer than a piece, with rows of zeros below them.
void product_of_filled_piece(const at::Tensor& out_RN, const at::Tensor& base_RN, const at::Tensor& a_RK,
                             const at::Tensor& b_KN) {
  const std::int64_t rows = out_RN.size(0), size = rows <= kFewPieceRows ? kFewPieceRows : kSmallPieceRows;
  const at::Tensor a = at::zeros({size, a_RK.size(1)}, a_RK.options()),
                   out = at::empty({size, out_RN.size(1)}, out_RN.options());
  a.narrow(0, 0, rows).copy_(a_RK);
  if (base_RN.defined()) out.narrow(0, 0, rows).copy_(base_RN);
  multiply(out, base_RN.defined() ? out : at::Tensor(), a, b_KN);
  out_RN.copy_(out.narrow(0, 0, rows));
}

}  // namespace

void product_of_rows(const at::Tensor& out_RN, const at::Tensor& base_RN, const at::Tensor& a_RK,
                     const at::Tensor& b_KN) {
  const auto piece = [&](const at::Tensor& tensor, std::int64_t row, std::int64_t rows) {
    return tensor.defined() ? tensor.narrow(0, row, rows) : tensor;
  };
  const std::int64_t rows = out_RN.size(0);
  const std::int64_t whole = for_each_whole_piece(rows, [&](std::int64_t row, std::int64_t size) {
    multiply(piece(out_RN, row, size), piece(base_RN, row, size), piece(a_RK, row, size), b_KN);
  });
  if (whole == rows) return;
  // Rows of the piece before may be made once more instead, unless they were the base.
  if (whole > 0 && !base_RN.defined())
    return multiply(piece(out_RN, rows - kSmallPieceRows, kSmallPieceRows), base_RN,
                    piece(a_RK, rows - kSmallPieceRows, kSmallPieceRows), b_KN);
  product_of_filled_piece(piece(out_RN, whole, rows - whole), piece(base_RN, whole, rows - whole),
                          piece(a_RK, whole, rows - whole), b_KN);
}

void add_product_over_rows(const at::Tensor& sum_NK, const at::Tensor& grad_RN, const at::Tensor& x_RK,
                           const at::Tensor& product_NK) {
  const std::int64_t rows = grad_RN.size(0);
  const std::int64_t whole = for_each_whole_piece(rows, [&](std::int64_t row, std::int64_t size) {
    const at::Tensor grad = grad_RN.narrow(0, row, size).t(), x = x_RK.narrow(0, row, size);
    multiply(product_NK, at::Tensor(), grad, x);
    rows::add(product_NK.numel(), pointer<bfloat16>(product_NK), pointer<float>(sum_NK));
  });
  if (whole < rows)
    widened_product(sum_NK, sum_NK, grad_RN.narrow(0, whole, rows - whole).t(), x_RK.narrow(0, whole, rows - whole));
}

}  // namespace espalier
