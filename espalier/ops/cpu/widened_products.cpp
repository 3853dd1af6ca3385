#include "espalier/ops/cpu/widened_products.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <algorithm>

#include "espalier/base/instruction_set.h"
#include "espalier/ops/cpu/row_kernels.h"
#include "espalier/ops/dispatch.h"

namespace espalier {
namespace {

// Rows and columns of a panel. Each number that is widened or rounded, a pass over six bytes, stands against up to
// 2 x 1,024 operations of the product; three panels are 12 MiB.
constexpr std::int64_t kPanel = 1024;

// A panel in float32, whose memory stays from one product to the next.
class Panel {
 public:
  at::Tensor take(std::int64_t rows, std::int64_t columns) {
    if (!memory_.defined()) memory_ = at::empty({kPanel * kPanel}, at::kFloat);
    return memory_.narrow(0, 0, rows * columns).view({rows, columns});
  }

  // `part` in float32; a transposed part as a transposed view.
  at::Tensor widened(const at::Tensor& part) {
    if (part.stride(1) != 1) {
      ESPALIER_INTERNAL_EQ(part.stride(0), 1, "a factor that is contiguous in neither dimension");
      return widened(part.t()).t();
    }
    const at::Tensor out = take(part.size(0), part.size(1));
    rows::convert(part.size(0), part.size(1), pointer<bfloat16>(part), part.stride(0), pointer<float>(out),
                  part.size(1));
    return out;
  }

 private:
  at::Tensor memory_;
};

struct Panels {
  Panel a, b, sum;
};

at::Tensor part_of(const at::Tensor& tensor, std::int64_t row, std::int64_t column) {
  return tensor.narrow(0, row, std::min(kPanel, tensor.size(0) - row))
      .narrow(1, column, std::min(kPanel, tensor.size(1) - column));
}

// sum += or = a b over all of K, for the panel of rows and columns that begins at (row, column).
void add_panels(Panels& panels, at::Tensor& sum, bool from_zero, const at::Tensor& a_RK, const at::Tensor& b_KN,
                std::int64_t row, std::int64_t column) {
  for (std::int64_t k = 0; k < a_RK.size(1); k += kPanel) {
    const at::Tensor a = panels.a.widened(part_of(a_RK, row, k)), b = panels.b.widened(part_of(b_KN, k, column));
    if (from_zero && k == 0)
      at::mm_out(sum, a, b);
    else
      sum.addmm_(a, b);
  }
}

}  // namespace

bool widens_products(at::ScalarType dtype) {
  return dtype == at::kBFloat16 && bfloat16_products() == Bfloat16Products::converted;
}

void widened_product(const at::Tensor& out_RN, const at::Tensor& base_RN, const at::Tensor& a_RK,
                     const at::Tensor& b_KN) {
  static thread_local Panels panels;
  const bool rounds = out_RN.scalar_type() == at::kBFloat16, from_zero = !base_RN.defined();
  if (a_RK.size(1) == 0 && from_zero) out_RN.zero_();
  if (!rounds && !from_zero && !base_RN.is_same(out_RN)) out_RN.copy_(base_RN);
  for (std::int64_t column = 0; column < out_RN.size(1); column += kPanel)
    for (std::int64_t row = 0; row < out_RN.size(0); row += kPanel) {
      const at::Tensor out = part_of(out_RN, row, column);
      at::Tensor sum = !rounds     ? out
                       : from_zero ? panels.sum.take(out.size(0), out.size(1))
                                   : panels.sum.widened(part_of(base_RN, row, column));
      add_panels(panels, sum, from_zero, a_RK, b_KN, row, column);
      if (rounds && (a_RK.size(1) > 0 || !from_zero))
        rows::convert(out.size(0), out.size(1), pointer<float>(sum), out.size(1), pointer<bfloat16>(out),
                      out.stride(0));
    }
}

}  // namespace espalier
