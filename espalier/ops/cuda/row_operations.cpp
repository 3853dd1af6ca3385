// Norm, rotation, SwiGLU and the moving of rows on a GPU.
#include <type_traits>

#include "espalier/ops/cpu/dispatch.h"
#include "espalier/ops/cuda/launch.h"
#include "espalier/ops/cuda/moving.h"
#include "espalier/ops/cuda/norm.h"
#include "espalier/ops/cuda/operations.h"

namespace espalier::cuda {
namespace {

// RMSNorm alone.
const at::Tensor& weight_of(const NormWeights& weights) {
  if (weights.kind != NormKind::rms || weights.bias_M.defined())
    throw UnsupportedError({"norm", "RMSNorm as in Llama on a GPU", "another norm", "use --device cpu"});
  return weights.weight_M;
}
void check_taken(const Rotation& rotation) {
  if (!rotation.is_plain())
    throw UnsupportedError({"rotary positions", "rotation of whole heads in halves on a GPU",
                            "another rotation or norm", "use --device cpu"});
}
void check_taken(const ActivationRule& rule) {
  if (rule.kind != Activation::silu || !rule.gated)
    throw UnsupportedError({"activation", "SwiGLU on a GPU", "another activation", "use --device cpu"});
}

void norm_rows(const at::Tensor& stream, const NormWeights& weights, double eps, const at::Tensor& y,
               const at::Tensor& rstd) {
  const at::Tensor& weight = weight_of(weights);
  dispatch(stream.scalar_type(), [&]<class T>() {
    norm<T>(stream.size(0), stream.size(1), pointer<T>(stream), pointer<T>(weight), eps, pointer<T>(y),
            pointer<accumulator_t<T>>(rstd));
  });
}

void norm_rows_again(const at::Tensor& stream, const NormWeights& weights, const at::Tensor& rstd,
                     const at::Tensor& y) {
  const at::Tensor& weight = weight_of(weights);
  dispatch(stream.scalar_type(), [&]<class T>() {
    norm_again<T>(stream.size(0), stream.size(1), pointer<T>(stream), pointer<T>(weight),
                  pointer<accumulator_t<T>>(rstd), pointer<T>(y));
  });
}

void add_norm_rows_backward(const at::Tensor& stream, const NormWeights& weights, const at::Tensor& rstd,
                            const at::Tensor& grad_y, const at::Tensor& grad_stream, const NormWeights& grads) {
  const at::Tensor &weight = weight_of(weights), &grad_weight = grads.weight_M;
  const std::int64_t bytes = stream.size(1) * rstd.element_size();
  if (bytes > kWidestNorm)
    throw UnsupportedError({"norm", text_of("rows of at most ", kWidestNorm, " bytes of sums on a GPU"),
                            text_of(stream.size(1), " columns"), "use --device cpu, or a smaller dtype"});
  dispatch(stream.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    add_norm_backward<T>(stream.size(0), stream.size(1), pointer<T>(stream), pointer<T>(weight), pointer<A>(rstd),
                         pointer<T>(grad_y), pointer<T>(grad_stream), pointer<A>(grad_weight));
  });
}

Heads heads_of(const Rotation& rotation, const at::Tensor& in) {
  check_taken(rotation);
  const std::int64_t head_dim = 2 * rotation.tables.cos.size(1);
  return {in.size(0), in.size(1) / head_dim, head_dim, rotation.eps, pointer<std::int32_t>(rotation.position_R)};
}

void rotate_heads(const Rotation& rotation, const at::Tensor& in, const at::Tensor& out) {
  dispatch(in.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    rotate<T>(heads_of(rotation, in), pointer<T>(in), in.stride(0), pointer<T>(rotation.norm_weight_D),
              pointer<A>(rotation.tables.cos), pointer<A>(rotation.tables.sin), pointer<T>(out), out.stride(0));
  });
}

void add_rotate_heads_backward(const Rotation& rotation, const at::Tensor& in, const at::Tensor& grad_out,
                               const at::Tensor& grad_in, const at::Tensor& grad_norm_weight) {
  dispatch(in.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    const auto from = [&]<class G>() {
      add_rotate_backward<T, G>(heads_of(rotation, in), pointer<T>(in), in.stride(0),
                                pointer<T>(rotation.norm_weight_D), pointer<A>(rotation.tables.cos),
                                pointer<A>(rotation.tables.sin), pointer<G>(grad_out), grad_out.stride(0),
                                pointer<T>(grad_in), grad_in.stride(0), pointer<A>(grad_norm_weight));
    };
    grad_out.scalar_type() == in.scalar_type() ? from.template operator()<T>() : from.template operator()<A>();
  });
}

void swiglu_rows(const ActivationRule& rule, const at::Tensor& gate_up, const at::Tensor& act) {
  check_taken(rule);
  dispatch(act.scalar_type(),
           [&]<class T>() { swiglu<T>(act.size(0), act.size(1), pointer<T>(gate_up), pointer<T>(act)); });
}

void swiglu_rows_backward(const ActivationRule& rule, const at::Tensor& gate_up, const at::Tensor& grad_act,
                          const at::Tensor& grad_gate_up, const at::Tensor& act) {
  check_taken(rule);
  dispatch(act.scalar_type(), [&]<class T>() {
    swiglu_backward<T>(act.size(0), act.size(1), pointer<T>(gate_up), pointer<T>(grad_act), pointer<T>(grad_gate_up),
                       pointer<T>(act));
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

void add_scaled(const at::Tensor&, const at::Tensor&, double, const at::Tensor&) {
  throw UnsupportedError({"scaled rows",
                          "models without residual factors, norms after attention or MLP, or gates on a GPU",
                          "one with them", "use --device cpu"});
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
  return {gather_rows,  add_scatter_rows,
          look_up_rows, add_look_up_rows_backward,
          scatter_rows, move_rows,
          convert_rows, zero_rows_of,
          add_scaled,   zero,
          scale_all};
}

}  // namespace espalier::cuda
