// Shares the rows of each kernel among the threads. Parameter gradients are summed in short runs of rows, the runs in a
// fixed number of shares, and the shares in order: any number of threads gives the same bits.
#include "espalier/ops/cpu/row_kernels.h"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "espalier/base/instruction_set.h"
#include "espalier/ops/cpu/row_ranges.h"

namespace espalier::rows {
namespace {

// Below this many elements a second thread costs more than it saves.
constexpr std::int64_t kParallelFrom = 16384;
// Elements of one share of a flat range are a multiple of this: threads meet at no cache line.
constexpr std::int64_t kFlatGrain = 64;
// Rows whose parameter gradients are summed before they join the share's sum; keeps float sums short.
constexpr std::int64_t kRowsOfRun = 32;
// Shares of the rows that have sums of their own, at most; a thread takes whole shares.
constexpr std::int64_t kShares = 32;

template <class T>
NormRanges<T> norm() {
  return ESPALIER_FOR_SET(norm_ranges<T>)();
}
template <class T>
GateRanges<T> gate() {
  return ESPALIER_FOR_SET(gate_ranges<T>)();
}
template <class In, class Out>
MoveRanges<In, Out> move() {
  return ESPALIER_FOR_SET(move_ranges<In, Out>)();
}

// Part `index` of `parts` equal parts of [0, count), cut at multiples of the grain.
RowRange share_of(std::int64_t count, std::int64_t grain, int index, int parts) {
  const std::int64_t grains = (count + grain - 1) / grain;
  return {std::min(count, grains * index / parts * grain), std::min(count, grains * (index + 1) / parts * grain)};
}

template <class Body>
void share(std::int64_t count, std::int64_t grain, std::int64_t elements, Body body) {
#pragma omp parallel if (elements >= kParallelFrom && count > grain)
  {
    const RowRange range = share_of(count, grain, omp_get_thread_num(), omp_get_num_threads());
    if (range.begin < range.end) body(range);
  }
}

// Zeros, `count` of them, until the thread's next call with this place.
template <class A, int place>
A* zeros_of_thread(std::size_t count) {
  static thread_local std::vector<A> memory;
  memory.assign(count, A(0));
  return memory.data();
}

// into_m += sum over rows, where body(range, sums) adds the sums of some rows to sums [width]. into null: the sums are
// dropped.
template <class A, class Body>
void share_with_sums(std::int64_t rows, std::int64_t width, std::int64_t elements, A* into, Body body) {
  const std::int64_t row_of_sums = (width + kFlatGrain - 1) / kFlatGrain * kFlatGrain;
  const auto shares = static_cast<int>(std::min(kShares, (rows + kRowsOfRun - 1) / kRowsOfRun));
  A* const all_sums = zeros_of_thread<A, 0>(static_cast<std::size_t>(row_of_sums * shares));
#pragma omp parallel if (elements >= kParallelFrom && rows > 1)
  {
#pragma omp for schedule(static)
    for (int share = 0; share < shares; ++share) {
      const RowRange range = share_of(rows, 1, share, shares);
      for (std::int64_t begin = range.begin; begin < range.end; begin += kRowsOfRun) {
        A* const run = zeros_of_thread<A, 1>(static_cast<std::size_t>(width));
        body(RowRange{begin, std::min(begin + kRowsOfRun, range.end)}, run);
        for (std::int64_t m = 0; m < width; ++m) all_sums[share * row_of_sums + m] += run[m];
      }
    }
    const RowRange columns = share_of(width, kFlatGrain, omp_get_thread_num(), omp_get_num_threads());
    for (int share = 0; into != nullptr && share < shares; ++share)
      for (std::int64_t m = columns.begin; m < columns.end; ++m) into[m] += all_sums[share * row_of_sums + m];
  }
}

}  // namespace

template <class T>
void rms_norm(std::int64_t rows, std::int64_t width, const T* stream, NormOf<T> of, double eps, T* y,
              accumulator_t<T>* rstd) {
  const auto kernel = norm<T>().rms_norm;
  share(rows, 1, rows * width,
        [&](RowRange range) { kernel(range, width, stream, of, static_cast<accumulator_t<T>>(eps), y, rstd); });
}

template <class T>
void rms_norm_again(std::int64_t rows, std::int64_t width, const T* stream, NormOf<T> of, const accumulator_t<T>* rstd,
                    T* y) {
  const auto kernel = norm<T>().rms_norm_again;
  share(rows, 1, rows * width, [&](RowRange range) { kernel(range, width, stream, of, rstd, y); });
}

template <class T>
void add_rms_norm_backward(std::int64_t rows, std::int64_t width, const T* stream, NormOf<T> of,
                           const accumulator_t<T>* rstd, const T* grad_y, T* grad_stream, accumulator_t<T>* grad_weight,
                           accumulator_t<T>* grad_bias) {
  const auto kernel = norm<T>().add_rms_norm_backward;
  const auto on = [&](RowRange range, accumulator_t<T>* sums) {
    kernel(range, width, stream, of, rstd, grad_y, grad_stream, sums);
  };
  if (of.bias == nullptr) return share_with_sums(rows, width, rows * width, grad_weight, on);
  std::vector<accumulator_t<T>> both(static_cast<std::size_t>(2 * width));
  share_with_sums(rows, 2 * width, rows * width, both.data(), on);
  for (std::int64_t m = 0; m < width; ++m) {
    if (grad_weight != nullptr) grad_weight[m] += both[static_cast<std::size_t>(m)];
    if (grad_bias != nullptr) grad_bias[m] += both[static_cast<std::size_t>(width + m)];
  }
}

template <class T>
void norm_rotate(const HeadShape& shape, const T* in, std::int64_t in_stride, const T* norm_weight,
                 const accumulator_t<T>* cos, const accumulator_t<T>* sin, T* out, std::int64_t out_stride) {
  const auto kernel = norm<T>().norm_rotate;
  share(shape.rows, 1, shape.rows * shape.heads * shape.head_dim,
        [&](RowRange range) { kernel(range, shape, in, in_stride, norm_weight, cos, sin, out, out_stride); });
}

template <class T, class G>
void add_norm_rotate_backward(const HeadShape& shape, const T* in, std::int64_t in_stride, const T* norm_weight,
                              const accumulator_t<T>* cos, const accumulator_t<T>* sin, const G* grad_out,
                              std::int64_t grad_out_stride, T* grad_in, std::int64_t grad_in_stride,
                              accumulator_t<T>* grad_norm_weight) {
  const auto kernel = ESPALIER_FOR_SET(rotate_backward_ranges<T, G>)().add_norm_rotate_backward;
  const auto on = [&](RowRange range, accumulator_t<T>* sums) {
    kernel(range, shape, in, in_stride, norm_weight, cos, sin, grad_out, grad_out_stride, grad_in, grad_in_stride,
           sums);
  };
  const std::int64_t elements = shape.rows * shape.heads * shape.head_dim;
  if (norm_weight != nullptr)
    share_with_sums(shape.rows, (shape.wide_norm ? shape.heads : 1) * shape.head_dim, elements, grad_norm_weight, on);
  else
    share(shape.rows, 1, elements, [&](RowRange range) { on(range, nullptr); });
}

template <class T>
void swiglu(const ActivationRule& rule, std::int64_t rows, std::int64_t inner, const T* gate_up, T* act) {
  const auto kernel = gate<T>().swiglu;
  share(rows, 1, rows * inner, [&](RowRange range) { kernel(range, rule, inner, gate_up, act); });
}

template <class T>
void swiglu_backward(const ActivationRule& rule, std::int64_t rows, std::int64_t inner, const T* gate_up,
                     const T* grad_act, T* grad_gate_up, T* act) {
  const auto kernel = gate<T>().swiglu_backward;
  share(rows, 1, rows * inner,
        [&](RowRange range) { kernel(range, rule, inner, gate_up, grad_act, grad_gate_up, act); });
}

template <class T>
void add_scaled(std::int64_t count, const T* base, const T* x, double factor, T* out) {
  const auto kernel = gate<T>().add_scaled;
  share(count, kFlatGrain, count,
        [&](RowRange range) { kernel(range, base, x, static_cast<accumulator_t<T>>(factor), out); });
}

template <class T>
void gather(std::int64_t rows, std::int64_t width, const T* table, const std::int32_t* id, T* x) {
  share(rows, 1, rows * width, [&](RowRange range) {
    for (std::int64_t r = range.begin; r < range.end; ++r)
      std::memcpy(static_cast<void*>(x + r * width), table + id[r] * width,
                  static_cast<std::size_t>(width) * sizeof(T));
  });
}

template <class In, class Out>
void add_scatter(std::int64_t rows, std::int64_t width, const In* x, const std::int32_t* id, Out* into) {
  const auto kernel = move<In, Out>().add_scatter;
  share(width, kFlatGrain, rows * width, [&](RowRange columns) { kernel(columns, rows, width, x, id, into); });
}

template <class T>
void add_bias(std::int64_t rows, std::int64_t width, const T* bias, T* y) {
  const auto kernel = gate<T>().add_bias;
  share(rows, 1, rows * width, [&](RowRange range) { kernel(range, width, bias, y); });
}

template <class T>
void add_column_sums(std::int64_t rows, std::int64_t width, const T* grad_y, std::int64_t stride,
                     accumulator_t<T>* grad_bias) {
  const auto kernel = gate<T>().column_sums;
  share_with_sums(rows, width, rows * width, grad_bias,
                  [&](RowRange range, accumulator_t<T>* sums) { kernel(range, width, grad_y, stride, sums); });
}

template <class In, class Out>
void convert(std::int64_t rows, std::int64_t width, const In* in, std::int64_t in_stride, Out* out,
             std::int64_t out_stride) {
  const auto kernel = move<In, Out>().convert;
  if (in_stride == width && out_stride == width) {
    share(rows * width, kFlatGrain, rows * width, [&](RowRange range) {
      kernel(RowRange{0, 1}, range.end - range.begin, in + range.begin, 0, out + range.begin, 0);
    });
  } else {
    share(rows, 1, rows * width, [&](RowRange range) { kernel(range, width, in, in_stride, out, out_stride); });
  }
}

template <class In, class Out>
void add(std::int64_t count, const In* x, Out* into) {
  const auto kernel = move<In, Out>().add;
  share(count, kFlatGrain, count, [&](RowRange range) { kernel(range, x, into); });
}

#define ESPALIER_INSTANTIATE(T)                                                                                    \
  template void rms_norm<T>(std::int64_t, std::int64_t, const T*, NormOf<T>, double, T*, accumulator_t<T>*);       \
  template void rms_norm_again<T>(std::int64_t, std::int64_t, const T*, NormOf<T>, const accumulator_t<T>*, T*);   \
  template void add_rms_norm_backward<T>(std::int64_t, std::int64_t, const T*, NormOf<T>, const accumulator_t<T>*, \
                                         const T*, T*, accumulator_t<T>*, accumulator_t<T>*);                      \
  template void norm_rotate(const HeadShape&, const T*, std::int64_t, const T*, const accumulator_t<T>*,           \
                            const accumulator_t<T>*, T*, std::int64_t);                                            \
  template void swiglu(const ActivationRule&, std::int64_t, std::int64_t, const T*, T*);                           \
  template void swiglu_backward(const ActivationRule&, std::int64_t, std::int64_t, const T*, const T*, T*, T*);    \
  template void add_scaled(std::int64_t, const T*, const T*, double, T*);                                          \
  template void gather(std::int64_t, std::int64_t, const T*, const std::int32_t*, T*);                             \
  template void add_bias(std::int64_t, std::int64_t, const T*, T*);                                                \
  template void add_column_sums(std::int64_t, std::int64_t, const T*, std::int64_t, accumulator_t<T>*)
#define ESPALIER_INSTANTIATE_GRADIENT(T, G)                                                                           \
  template void add_norm_rotate_backward(const HeadShape&, const T*, std::int64_t, const T*, const accumulator_t<T>*, \
                                         const accumulator_t<T>*, const G*, std::int64_t, T*, std::int64_t,           \
                                         accumulator_t<T>*)
#define ESPALIER_INSTANTIATE_CONVERT(In, Out) \
  template void convert(std::int64_t, std::int64_t, const In*, std::int64_t, Out*, std::int64_t)
#define ESPALIER_INSTANTIATE_MOVE(In, Out)                                                     \
  template void add_scatter(std::int64_t, std::int64_t, const In*, const std::int32_t*, Out*); \
  template void add(std::int64_t, const In*, Out*);                                            \
  ESPALIER_INSTANTIATE_CONVERT(In, Out)

ESPALIER_INSTANTIATE(float);
ESPALIER_INSTANTIATE(double);
ESPALIER_INSTANTIATE(bfloat16);
ESPALIER_INSTANTIATE_GRADIENT(float, float);
ESPALIER_INSTANTIATE_GRADIENT(double, double);
ESPALIER_INSTANTIATE_GRADIENT(bfloat16, bfloat16);
ESPALIER_INSTANTIATE_GRADIENT(bfloat16, float);
ESPALIER_INSTANTIATE_MOVE(float, float);
ESPALIER_INSTANTIATE_MOVE(double, double);
ESPALIER_INSTANTIATE_MOVE(bfloat16, bfloat16);
ESPALIER_INSTANTIATE_MOVE(bfloat16, float);
ESPALIER_INSTANTIATE_MOVE(float, bfloat16);
ESPALIER_INSTANTIATE_CONVERT(float, double);
ESPALIER_INSTANTIATE_CONVERT(double, float);
#undef ESPALIER_INSTANTIATE_MOVE
#undef ESPALIER_INSTANTIATE_CONVERT
#undef ESPALIER_INSTANTIATE_GRADIENT
#undef ESPALIER_INSTANTIATE

}  // namespace espalier::rows
