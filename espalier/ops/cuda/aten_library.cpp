#include "espalier/ops/cuda/aten_library.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>

#include "espalier/ops/cuda/attention.h"
#include "espalier/ops/cuda/launch.h"
#include "espalier/ops/dispatch.h"

namespace espalier::cuda {
namespace {

// Heads of a row behind each other, as the kernel reads them.
at::Tensor in_rows(const at::Tensor& out) {
  return out.stride(2) == 1 && out.stride(1) == out.size(2) ? out : out.contiguous();
}

template <class T>
AttentionPart<T> part_of(const at::Tensor& out, const at::Tensor& lse) {
  return {{pointer<T>(out), out.stride(0)}, pointer<accumulator_t<T>>(lse), lse.stride(0), lse.stride(1)};
}

}  // namespace

at::Tensor AtenLibrary::seen(const at::Tensor& tensor) const { return seen_by_aten(tensor); }

std::vector<std::int32_t> AtenLibrary::on_host(const at::Tensor& whole_numbers) const {
  std::vector<std::int32_t> values(static_cast<std::size_t>(whole_numbers.numel()));
  copy_to_host(values.data(), whole_numbers.data_ptr(), values.size() * sizeof(std::int32_t));
  return values;
}

at::Tensor AtenLibrary::on_device(const at::Tensor& whole_numbers) const { return whole_numbers.to(aten_device()); }

void AtenLibrary::merge(const Result& first, const Result& second, const at::Tensor& out, const at::Tensor& lse) const {
  const at::Tensor first_out = in_rows(first.out), second_out = in_rows(second.out);
  dispatch(second_out.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    const auto merged = [&]<class First, class Out>() {
      merge_attention(out.size(0), out.size(1), out.size(2), part_of<First>(first_out, first.lse),
                      part_of<T>(second_out, second.lse), part_of<Out>(out, lse));
    };
    if (out.scalar_type() == second_out.scalar_type()) return merged.template operator()<T, T>();
    if (first_out.scalar_type() == out.scalar_type()) return merged.template operator()<A, A>();
    merged.template operator()<T, A>();
  });
}

}  // namespace espalier::cuda
