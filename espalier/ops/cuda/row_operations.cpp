// Norm, rotation, SwiGLU and the moving of rows on a GPU.
#include <type_traits>

#include "espalier/ops/cuda/columns.h"
#include "espalier/ops/cuda/launch.h"
#include "espalier/ops/cuda/moving.h"
#include "espalier/ops/cuda/norm.h"
#include "espalier/ops/cuda/operations.h"
#include "espalier/ops/dispatch.h"

namespace espalier::cuda {
namespace {

bool is_swiglu(const ActivationRule& rule) { return rule.kind == Activation::silu && rule.gated; }

void norm_rows(const at::Tensor& stream, const NormWeights& weights, double eps, const at::Tensor& y,
               const at::Tensor& rstd) {
  dispatch(stream.scalar_type(), [&]<class T>() {
    norm<T>(weights.kind, stream.size(0), stream.size(1), pointer<T>(stream), pointer<T>(weights.weight_M),
            pointer<T>(weights.bias_M), eps, pointer<T>(y), pointer<accumulator_t<T>>(rstd));
  });
}

void norm_rows_again(const at::Tensor& stream, const NormWeights& weights, const at::Tensor& rstd,
                     const at::Tensor& y) {
  dispatch(stream.scalar_type(), [&]<class T>() {
    norm_again<T>(weights.kind, stream.size(0), stream.size(1), pointer<T>(stream), pointer<T>(weights.weight_M),
                  pointer<T>(weights.bias_M), pointer<accumulator_t<T>>(rstd), pointer<T>(y));
  });
}

// Errors: UnsupportedError where sums of `columns` columns do not fit a block.
void check_width(const char* what, std::int64_t columns, std::int64_t bytes) {
  if (bytes <= kWidestNorm) return;
  throw UnsupportedError({what, text_of("rows of at most ", kWidestNorm, " bytes of sums on a GPU"),
                          text_of(columns, " columns"), "use --device cpu, or a smaller dtype"});
}

void add_norm_rows_backward(const at::Tensor& stream, const NormWeights& weights, const at::Tensor& rstd,
                            const at::Tensor& grad_y, const at::Tensor& grad_stream, const NormWeights& grads) {
  check_width("norm", stream.size(1), stream.size(1) * rstd.element_size());
  dispatch(stream.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    const std::int64_t rows = stream.size(0), width = stream.size(1);
    add_norm_backward<T>(weights.kind, rows, width, pointer<T>(stream), pointer<T>(weights.weight_M), pointer<A>(rstd),
                         pointer<T>(grad_y), pointer<T>(grad_stream), pointer<A>(grads.weight_M));
    if (grads.bias_M.defined())
      add_column_sums<A>(rows, width, pointer<T>(grad_y), width, nullptr, pointer<A>(grads.bias_M));
  });
}

Heads heads_of(const Rotation& rotation, const at::Tensor& in) {
  const std::int64_t head_dim = rotation.head_width();
  return {.rows = in.size(0),
          .heads = in.size(1) / head_dim,
          .head_dim = head_dim,
          .eps = rotation.eps,
          .position = pointer<std::int32_t>(rotation.position_R),
          .rotary = 2 * rotation.tables.cos.size(1),
          .first = rotation.first,
          .interleaved = rotation.interleaved,
          .wide_norm = rotation.has_wide_norm(),
          .norm = rotation.norm};
}

void rotate_heads(const Rotation& rotation, const at::Tensor& in, const at::Tensor& out) {
  dispatch(in.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    (rotation.is_plain() ? rotate<T> : rotate_part<T>)(heads_of(rotation, in), pointer<T>(in), in.stride(0),
                                                       pointer<T>(rotation.norm_weight_D),
                                                       pointer<A>(rotation.tables.cos), pointer<A>(rotation.tables.sin),
                                                       pointer<T>(out), out.stride(0));
  });
}

void add_rotate_heads_backward(const Rotation& rotation, const at::Tensor& in, const at::Tensor& grad_out,
                               const at::Tensor& grad_in, const at::Tensor& grad_norm_weight) {
  dispatch(in.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    if (rotation.has_wide_norm())
      check_width("norm over all heads", in.size(1), in.size(1) * static_cast<std::int64_t>(sizeof(A)));
    const auto from = [&]<class G>() {
      (rotation.is_plain()
           ? add_rotate_backward<T, G>
           : add_rotate_part_backward<T, G>)(heads_of(rotation, in), pointer<T>(in), in.stride(0),
                                             pointer<T>(rotation.norm_weight_D), pointer<A>(rotation.tables.cos),
                                             pointer<A>(rotation.tables.sin), pointer<G>(grad_out), grad_out.stride(0),
                                             pointer<T>(grad_in), grad_in.stride(0), pointer<A>(grad_norm_weight));
    };
    grad_out.scalar_type() == in.scalar_type() ? from.template operator()<T>() : from.template operator()<A>();
  });
}

void swiglu_rows(const ActivationRule& rule, const at::Tensor& gate_up, const at::Tensor& act) {
  dispatch(act.scalar_type(), [&]<class T>() {
    const std::int64_t rows = act.size(0), inner = act.size(1);
    is_swiglu(rule) ? swiglu<T>(rows, inner, pointer<T>(gate_up), pointer<T>(act))
                    : activate<T>(rule, rows, inner, pointer<T>(gate_up), pointer<T>(act));
  });
}

void swiglu_rows_backward(const ActivationRule& rule, const at::Tensor& gate_up, const at::Tensor& grad_act,
                          const at::Tensor& grad_gate_up, const at::Tensor& act) {
  dispatch(act.scalar_type(), [&]<class T>() {
    const std::int64_t rows = act.size(0), inner = act.size(1);
    is_swiglu(rule) ? swiglu_backward<T>(rows, inner, pointer<T>(gate_up), pointer<T>(grad_act),
                                         pointer<T>(grad_gate_up), pointer<T>(act))
                    : activate_backward<T>(rule, rows, inner, pointer<T>(gate_up), pointer<T>(grad_act),
                                           pointer<T>(grad_gate_up), pointer<T>(act));
  });
}

std::int64_t row_elements(const at::Tensor& x) {
  std::int64_t count = 1;
  for (std::int64_t dimension = 1; dimension < x.dim(); ++dimension) count *= x.size(dimension);
  return count;
}
int size_of(const at::Tensor& x) { return static_cast<int>(x.element_size()); }
RowsFrom rows_from(const at::Tensor& x) { return {x.data_ptr(), x.stride(0)}; }
RowsTo rows_to(const at::Tensor& x) { return {x.data_ptr(), x.stride(0)}; }

void look_up_rows(const at::Tensor& table, const at::Tensor& id, std::int64_t first, const at::Tensor& x) {
  look_up(x.size(0), row_elements(x), size_of(x), rows_from(table), table.size(0), pointer<std::int32_t>(id), first,
          rows_to(x));
}

void gather_rows(const at::Tensor& table, const at::Tensor& row, const at::Tensor& x) {
  look_up_rows(table, row, 0, x);
}

void add_look_up_rows_backward(const at::Tensor& x, const at::Tensor& id, std::int64_t first, const at::Tensor& into) {
  dispatch(x.scalar_type(), [&]<class T>() {
    const auto to = [&]<class Out>() {
      add_look_up_backward<T, Out>(x.size(0), row_elements(x), pointer<T>(x), pointer<std::int32_t>(id), first,
                                   into.size(0), pointer<Out>(into));
    };
    into.scalar_type() == x.scalar_type() ? to.template operator()<T>() : to.template operator()<accumulator_t<T>>();
  });
}

void add_scatter_rows(const at::Tensor& x, const at::Tensor& row, const at::Tensor& into) {
  add_look_up_rows_backward(x, row, 0, into);
}

void scatter_rows(const at::Tensor& x, const at::Tensor& row, const at::Tensor& into) {
  scatter(x.size(0), row_elements(x), size_of(x), rows_from(x), pointer<std::int32_t>(row), rows_to(into));
}

void move_rows(const at::Tensor& x, std::int64_t from, std::int64_t to, std::int64_t count) {
  const std::int64_t row = x.stride(0) * x.element_size();
  const auto bytes = static_cast<std::size_t>(count * row);
  auto* const memory = static_cast<std::byte*>(x.data_ptr());
  if (from + count <= to || to + count <= from) return copy_on_device(memory + to * row, memory + from * row, bytes);
  const Scratch<std::byte> copy(count * row);
  copy_on_device(copy.get(), memory + from * row, bytes);
  copy_on_device(memory + to * row, copy.get(), bytes);
}

void convert_rows(const at::Tensor& in, const at::Tensor& out) {
  const bool flat = in.is_contiguous() && out.is_contiguous();
  const std::int64_t rows = flat ? 1 : in.size(0), width = flat ? in.numel() : row_elements(in);
  const std::int64_t in_stride = flat ? width : in.stride(0), out_stride = flat ? width : out.stride(0);
  if (in.scalar_type() == out.scalar_type()) {
    if (flat) return copy_on_device(out.data_ptr(), in.data_ptr(), static_cast<std::size_t>(width * in.element_size()));
    return copy_rows(rows, width, size_of(in), {in.data_ptr(), in_stride}, {out.data_ptr(), out_stride});
  }
  dispatch(in.scalar_type(), [&]<class In>() {
    dispatch(out.scalar_type(), [&]<class Out>() {
      constexpr bool known = std::is_same_v<In, float> != std::is_same_v<Out, float>;
      ESPALIER_INTERNAL(known, c10::toString(in.scalar_type()), " to ", c10::toString(out.scalar_type()));
      if constexpr (known) convert<In, Out>(rows, width, pointer<In>(in), in_stride, pointer<Out>(out), out_stride);
    });
  });
}

void zero_rows_of(const at::Tensor& x, const at::Tensor& id, std::int64_t zeroed) {
  zero_rows(x.size(0), row_elements(x), size_of(x), rows_to(x), pointer<std::int32_t>(id),
            static_cast<std::int32_t>(zeroed));
}

void add_scaled_rows(const at::Tensor& base, const at::Tensor& x, double factor, const at::Tensor& out) {
  dispatch(out.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    add_scaled<T>(out.numel(), pointer<T>(base), pointer<T>(x), static_cast<A>(factor), pointer<T>(out));
  });
}

void zero(const at::Tensor& x) { fill_zero(x.data_ptr(), static_cast<std::size_t>(x.numel() * x.element_size())); }

void scale_all(const at::Tensor& x, double factor) {
  dispatch(x.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    scale<T>(x.numel(), static_cast<A>(factor), pointer<T>(x));
  });
}

}  // namespace

NormOperations norm_operations() { return {norm_rows, norm_rows_again, add_norm_rows_backward}; }
RotationOperations rotation_operations() { return {rotate_heads, add_rotate_heads_backward}; }
SwigluOperations swiglu_operations() { return {swiglu_rows, swiglu_rows_backward}; }
MovingOperations moving_operations() {
  return {gather_rows, add_scatter_rows, look_up_rows, add_look_up_rows_backward, scatter_rows,
          move_rows,   convert_rows,     zero_rows_of, add_scaled_rows,           zero,
          scale_all};
}

}  // namespace espalier::cuda
