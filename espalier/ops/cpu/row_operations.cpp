// Norm, rotation, SwiGLU and the moving of rows on a CPU: tensors to the kernels of row_kernels.h.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "espalier/ops/cpu/operations.h"
#include "espalier/ops/cpu/row_kernels.h"
#include "espalier/ops/dispatch.h"

namespace espalier::cpu {
namespace {

template <class T>
rows::NormParameters<T> parameters_of(const NormWeights& weights) {
  return {pointer<T>(weights.weight_M), weights.kind, pointer<T>(weights.bias_M)};
}

void norm(const at::Tensor& stream, const NormWeights& weights, double eps, const at::Tensor& y,
          const at::Tensor& rstd) {
  dispatch(stream.scalar_type(), [&]<class T>() {
    rows::rms_norm<T>(stream.size(0), stream.size(1), pointer<T>(stream), parameters_of<T>(weights), eps, pointer<T>(y),
                      pointer<accumulator_t<T>>(rstd));
  });
}

void norm_again(const at::Tensor& stream, const NormWeights& weights, const at::Tensor& rstd, const at::Tensor& y) {
  dispatch(stream.scalar_type(), [&]<class T>() {
    rows::rms_norm_again<T>(stream.size(0), stream.size(1), pointer<T>(stream), parameters_of<T>(weights),
                            pointer<accumulator_t<T>>(rstd), pointer<T>(y));
  });
}

void add_norm_backward(const at::Tensor& stream, const NormWeights& weights, const at::Tensor& rstd,
                       const at::Tensor& grad_y, const at::Tensor& grad_stream, const NormWeights& grads) {
  dispatch(stream.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    rows::add_rms_norm_backward<T>(stream.size(0), stream.size(1), pointer<T>(stream), parameters_of<T>(weights),
                                   pointer<A>(rstd), pointer<T>(grad_y), pointer<T>(grad_stream),
                                   pointer<A>(grads.weight_M), pointer<A>(grads.bias_M));
  });
}

rows::HeadShape heads_of(const Rotation& rotation, const at::Tensor& in) {
  const std::int64_t head_dim = rotation.head_width();
  const bool wide = rotation.has_wide_norm();
  ESPALIER_INTERNAL((!rotation.interleaved && rotation.first == 0) || !rotation.norm_weight_D.defined(),
                    "interleaved pairs, or channels that stay before them, behind a norm");
  ESPALIER_INTERNAL(!wide || rotation.norm_weight_D.size(0) == in.size(1), "a norm over ",
                    rotation.norm_weight_D.sizes(), " of ", in.size(1), " columns");
  return {in.size(0),
          in.size(1) / head_dim,
          head_dim,
          rotation.eps,
          pointer<std::int32_t>(rotation.position_R),
          2 * rotation.tables.cos.size(1),
          rotation.interleaved,
          wide,
          rotation.norm,
          rotation.first};
}

void rotate(const Rotation& rotation, const at::Tensor& in, const at::Tensor& out) {
  dispatch(in.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    rows::norm_rotate<T>(heads_of(rotation, in), pointer<T>(in), in.stride(0), pointer<T>(rotation.norm_weight_D),
                         pointer<A>(rotation.tables.cos), pointer<A>(rotation.tables.sin), pointer<T>(out),
                         out.stride(0));
  });
}

template <class T, class G>
void add_rotate_backward(const Rotation& rotation, const at::Tensor& in, const at::Tensor& grad_out,
                         const at::Tensor& grad_in, const at::Tensor& grad_norm_weight) {
  using A = accumulator_t<T>;
  rows::add_norm_rotate_backward<T, G>(heads_of(rotation, in), pointer<T>(in), in.stride(0),
                                       pointer<T>(rotation.norm_weight_D), pointer<A>(rotation.tables.cos),
                                       pointer<A>(rotation.tables.sin), pointer<G>(grad_out), grad_out.stride(0),
                                       pointer<T>(grad_in), grad_in.stride(0), pointer<A>(grad_norm_weight));
}

void add_rotate_backward(const Rotation& rotation, const at::Tensor& in, const at::Tensor& grad_out,
                         const at::Tensor& grad_in, const at::Tensor& grad_norm_weight) {
  dispatch(in.scalar_type(), [&]<class T>() {
    if (grad_out.scalar_type() == in.scalar_type())
      add_rotate_backward<T, T>(rotation, in, grad_out, grad_in, grad_norm_weight);
    else
      add_rotate_backward<T, accumulator_t<T>>(rotation, in, grad_out, grad_in, grad_norm_weight);
  });
}

void swiglu(const ActivationRule& rule, const at::Tensor& gate_up, const at::Tensor& act) {
  dispatch(act.scalar_type(),
           [&]<class T>() { rows::swiglu<T>(rule, act.size(0), act.size(1), pointer<T>(gate_up), pointer<T>(act)); });
}

void swiglu_backward(const ActivationRule& rule, const at::Tensor& gate_up, const at::Tensor& grad_act,
                     const at::Tensor& grad_gate_up, const at::Tensor& act) {
  dispatch(act.scalar_type(), [&]<class T>() {
    rows::swiglu_backward<T>(rule, act.size(0), act.size(1), pointer<T>(gate_up), pointer<T>(grad_act),
                             pointer<T>(grad_gate_up), pointer<T>(act));
  });
}

std::int64_t row_elements(const at::Tensor& x) {
  std::int64_t count = 1;
  for (std::int64_t dimension = 1; dimension < x.dim(); ++dimension) count *= x.size(dimension);
  return count;
}

// Calls body with a type of as many bytes as the tensor's: to move numbers it does not matter which.
template <class Body>
void dispatch_size(const at::Tensor& x, Body&& body) {
  const std::int64_t bytes = x.element_size();
  ESPALIER_INTERNAL(bytes == 8 || bytes == 4 || bytes == 2, c10::toString(x.scalar_type()));
  bytes == 8   ? body.template operator()<double>()
  : bytes == 4 ? body.template operator()<float>()
               : body.template operator()<bfloat16>();
}

void gather(const at::Tensor& table, const at::Tensor& row, const at::Tensor& x) {
  dispatch_size(x, [&]<class T>() {
    rows::gather<T>(x.size(0), row_elements(x), pointer<T>(table), pointer<std::int32_t>(row), pointer<T>(x));
  });
}

void add_scatter(const at::Tensor& x, const at::Tensor& row, const at::Tensor& into) {
  dispatch(x.scalar_type(), [&]<class T>() {
    const auto to = [&]<class Out>() {
      rows::add_scatter<T, Out>(x.size(0), row_elements(x), pointer<T>(x), pointer<std::int32_t>(row),
                                pointer<Out>(into));
    };
    into.scalar_type() == x.scalar_type() ? to.template operator()<T>() : to.template operator()<accumulator_t<T>>();
  });
}

// Calls body(begin, end) for each run of rows whose id is one of the `count` from `first` on, and for each other run
// outside(begin, end).
template <class Inside, class Outside>
void for_each_run(const at::Tensor& id, std::int64_t first, std::int64_t count, Inside inside, Outside outside) {
  const auto* ids = pointer<std::int32_t>(id);
  const auto here = [&](std::int64_t r) { return ids[r] >= first && ids[r] < first + count; };
  for (std::int64_t begin = 0, end; begin < id.size(0); begin = end) {
    for (end = begin + 1; end < id.size(0) && here(end) == here(begin);) ++end;
    here(begin) ? inside(begin, end) : outside(begin, end);
  }
}

// Rows of bfloat16 into rows of float32.
void look_up_widened(const at::Tensor& table, const at::Tensor& id, std::int64_t first, const at::Tensor& x) {
  const std::int64_t width = row_elements(x);
  const auto* const ids = pointer<std::int32_t>(id);
  for_each_run(
      id, first, table.size(0),
      [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t r = begin; r < end; ++r)
          rows::convert(1, width, pointer<bfloat16>(table) + (ids[r] - first) * width, width,
                        pointer<float>(x) + r * width, width);
      },
      [&](std::int64_t begin, std::int64_t end) {
        std::fill(pointer<float>(x) + begin * width, pointer<float>(x) + end * width, 0.0F);
      });
}

void look_up(const at::Tensor& table, const at::Tensor& id, std::int64_t first, const at::Tensor& x) {
  if (table.scalar_type() == at::kBFloat16 && x.scalar_type() == at::kFloat)
    return look_up_widened(table, id, first, x);
  const std::int64_t width = row_elements(x);
  dispatch_size(x, [&]<class T>() {
    T* const to = pointer<T>(x);
    for_each_run(
        id, first, table.size(0),
        [&](std::int64_t begin, std::int64_t end) {
          rows::gather<T>(end - begin, width, pointer<T>(table) - first * width, pointer<std::int32_t>(id) + begin,
                          to + begin * width);
        },
        [&](std::int64_t begin, std::int64_t end) {
          std::memset(static_cast<void*>(to + begin * width), 0,
                      static_cast<std::size_t>((end - begin) * width) * sizeof(T));
        });
  });
}

void add_look_up_backward(const at::Tensor& x, const at::Tensor& id, std::int64_t first, const at::Tensor& into) {
  const std::int64_t width = row_elements(x);
  dispatch(x.scalar_type(), [&]<class T>() {
    const auto to = [&]<class Out>() {
      for_each_run(
          id, first, into.size(0),
          [&](std::int64_t begin, std::int64_t end) {
            rows::add_scatter<T, Out>(end - begin, width, pointer<T>(x) + begin * width,
                                      pointer<std::int32_t>(id) + begin, pointer<Out>(into) - first * width);
          },
          [](std::int64_t, std::int64_t) {});
    };
    into.scalar_type() == x.scalar_type() ? to.template operator()<T>() : to.template operator()<accumulator_t<T>>();
  });
}

std::byte* row_at(const at::Tensor& x, std::int64_t row) {
  return static_cast<std::byte*>(x.data_ptr()) + row * x.stride(0) * x.element_size();
}

void scatter(const at::Tensor& x, const at::Tensor& row, const at::Tensor& into) {
  const auto bytes = static_cast<std::size_t>(row_elements(x) * x.element_size());
  const auto* rows = pointer<std::int32_t>(row);
  for (std::int64_t r = 0; r < x.size(0); ++r) std::memcpy(row_at(into, rows[r]), row_at(x, r), bytes);
}

void move_rows(const at::Tensor& x, std::int64_t from, std::int64_t to, std::int64_t count) {
  std::memmove(row_at(x, to), row_at(x, from), static_cast<std::size_t>(count * x.stride(0) * x.element_size()));
}

void convert(const at::Tensor& in, const at::Tensor& out) {
  const bool flat = in.is_contiguous() && out.is_contiguous();
  const std::int64_t count = flat ? 1 : in.size(0), width = flat ? in.numel() : row_elements(in);
  const std::int64_t in_stride = flat ? width : in.stride(0), out_stride = flat ? width : out.stride(0);
  const auto run = [&]<class In, class Out>() {
    rows::convert<In, Out>(count, width, pointer<In>(in), in_stride, pointer<Out>(out), out_stride);
  };
  if (in.scalar_type() == out.scalar_type())
    return dispatch_size(in, [&]<class T>() { run.template operator()<T, T>(); });
  dispatch(in.scalar_type(), [&]<class In>() {
    dispatch(out.scalar_type(), [&]<class Out>() {
      constexpr bool known = std::is_same_v<In, float> || std::is_same_v<Out, float>;
      ESPALIER_INTERNAL(known, c10::toString(in.scalar_type()), " to ", c10::toString(out.scalar_type()));
      if constexpr (known) run.template operator()<In, Out>();
    });
  });
}

void add_scaled(const at::Tensor& base, const at::Tensor& x, double factor, const at::Tensor& out) {
  dispatch(out.scalar_type(), [&]<class T>() {
    rows::add_scaled<T>(out.numel(), pointer<T>(base), pointer<T>(x), factor, pointer<T>(out));
  });
}

void zero_rows(const at::Tensor& x, const at::Tensor& id, std::int64_t zeroed) {
  const auto* ids = pointer<std::int32_t>(id);
  const auto bytes = static_cast<std::size_t>(row_elements(x) * x.element_size());
  for (std::int64_t r = 0; r < x.size(0); ++r)
    if (ids[r] == zeroed) std::memset(static_cast<void*>(row_at(x, r)), 0, bytes);
}

void zero(const at::Tensor& x) { x.zero_(); }

// ATen would round the factor to bfloat16.
void scale(const at::Tensor& x, double factor) {
  ESPALIER_INTERNAL(x.is_contiguous(), "a scaled tensor with gaps");
  dispatch(x.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    T* const values = pointer<T>(x);
    for (std::int64_t i = 0; i < x.numel(); ++i) values[i] = T(static_cast<A>(values[i]) * static_cast<A>(factor));
  });
}

}  // namespace

NormOperations norm_operations() { return {norm, norm_again, add_norm_backward}; }
RotationOperations rotation_operations() { return {rotate, add_rotate_backward}; }
SwigluOperations swiglu_operations() { return {swiglu, swiglu_backward}; }
MovingOperations moving_operations() {
  return {gather,     add_scatter, look_up, add_look_up_backward, scatter, move_rows, convert, zero_rows,
          add_scaled, zero,        scale};
}

}  // namespace espalier::cpu
