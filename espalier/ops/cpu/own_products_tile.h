// Vectors, packed factors and the tile of own_products.h, for one instruction set.
//
// A lane of a packed factor holds an element: a number of the accumulator type, or two steps of bfloat16 where the
// processor multiplies them. A panel of b is [element][kPanelColumns]; rows of a are [row][kRowStride] where steps are
// adjacent, else [element][kSumRows].
#pragma once

#include <type_traits>

#include "espalier/base/simd.h"
#include "espalier/ops/cpu/own_products.h"

namespace espalier::ESPALIER_SIMD {

using own_products::Factor;
using own_products::kSumBlock;
using own_products::Product;
using own_products::Range;

ESPALIER_SIMD_INLINE std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
ESPALIER_SIMD_INLINE std::int64_t parts_of(std::int64_t n, std::int64_t size) { return (n + size - 1) / size; }

// 28 sums, 2 of b, 1 of a: 31 of 32 registers; or 15 of 16.
inline constexpr int kSumRows = kVectorRegisters == 32 ? 14 : 6, kSumVectors = 2;

using StepPair = std::uint32_t;
typedef StepPair StepPairs __attribute__((vector_size(ESPALIER_SIMD_BYTES)));

#ifdef ESPALIER_BFLOAT16_DOT
template <class T>
using Packed = StepPair;
template <class T>
using VectorOf = StepPairs;
ESPALIER_SIMD_INLINE FloatVector fma(StepPairs a, StepPairs b, FloatVector sum) {
  return reinterpret<FloatVector>(
      _mm512_dpbf16_ps(reinterpret<__m512>(sum), reinterpret<__m512bh>(a), reinterpret<__m512bh>(b)));
}
ESPALIER_SIMD_INLINE StepPairs everywhere(StepPair x) { return x - StepPairs{}; }
ESPALIER_SIMD_INLINE StepPairs load_packed(const StepPair* from) {
  StepPairs v;
  __builtin_memcpy(&v, from, sizeof(v));
  return v;
}
ESPALIER_SIMD_INLINE void store_packed(StepPair* to, StepPairs v) { __builtin_memcpy(to, &v, sizeof(v)); }
template <class T>
inline constexpr int kStepsOfElement = 2;
#else
template <class T>
using Packed = accumulator_t<T>;
template <class T>
using VectorOf = Vector<T>;
ESPALIER_SIMD_INLINE FloatVector everywhere(float x) { return broadcast(x); }
ESPALIER_SIMD_INLINE DoubleVector everywhere(double x) { return broadcast(x); }
template <class E>
ESPALIER_SIMD_INLINE Vector<E> load_packed(const E* from) {
  return load(from);
}
template <class E, class V>
ESPALIER_SIMD_INLINE void store_packed(E* to, V v) {
  store(to, v);
}
template <class T>
inline constexpr int kStepsOfElement = 1;
#endif

template <class T>
inline constexpr int kElementLanes = ESPALIER_SIMD_BYTES / static_cast<int>(sizeof(Packed<T>));
template <class T>
inline constexpr int kPanelColumns = kSumVectors* kElementLanes<T>;
template <class T>
inline constexpr std::int64_t kBlockElements = kSumBlock<T> / kStepsOfElement<T>;
// Not a power of two, so that rows share no sets of a cache.
template <class T>
inline constexpr std::int64_t kRowStride = kBlockElements<T> + kElementLanes<T>;

// Elements that hold `steps` steps: for bfloat16 whole pairs, the last one padded with a zero if the number is odd.
template <class T>
ESPALIER_SIMD_INLINE std::int64_t elements_of(std::int64_t steps) {
  return sizeof(T) == 2 ? parts_of(steps, 2) * 2 / kStepsOfElement<T> : steps;
}

// The elements of one line from `from` on, with `steps` valid steps; widened bfloat16 in the order 1 0 3 2 ... From: T,
// or bfloat16 for a factor of float.
template <class T, class From>
ESPALIER_SIMD_INLINE VectorOf<T> load_along(const From* from, std::int64_t steps) {
  constexpr std::int64_t whole = kElementLanes<T> * kStepsOfElement<T>;
#ifdef ESPALIER_BFLOAT16_DOT
  if (steps >= whole) return load_packed(reinterpret_cast<const StepPair*>(from));
  StepPairs v{};
  if (steps > 0) __builtin_memcpy(&v, from, static_cast<std::size_t>(steps) * sizeof(T));
  return v;
#else
  if constexpr (!std::is_same_v<T, From>) {
    return steps >= whole ? load(from) : load_some(from, static_cast<int>(steps > 0 ? steps : 0));
  } else if constexpr (sizeof(T) == 2) {
    typedef std::uint32_t Raw __attribute__((vector_size(ESPALIER_SIMD_BYTES / 2)));
    Raw raw{};
    const std::int64_t bytes = smaller(steps, whole) * 2;
    if (bytes == sizeof(raw))
      __builtin_memcpy(&raw, from, sizeof(raw));
    else if (bytes > 0)
      __builtin_memcpy(&raw, from, static_cast<std::size_t>(bytes));
    return detail::widen(reinterpret<detail::HalfBits>(raw >> 16 | raw << 16));
  } else {
    return steps >= whole ? load(from) : load_partial(from, static_cast<int>(steps > 0 ? steps : 0));
  }
#endif
}

// Element k of adjacent lines, `lines` of them valid; `from` is the first step of a block of `steps`.
template <class T, class From>
ESPALIER_SIMD_INLINE VectorOf<T> load_across(const From* from, std::int64_t stride, std::int64_t k, std::int64_t steps,
                                             std::int64_t lines) {
  const int count = static_cast<int>(lines < 0 ? 0 : smaller(lines, kElementLanes<T>));
#ifdef ESPALIER_BFLOAT16_DOT
  const auto halves = [&](std::int64_t step) __attribute__((always_inline)) {
    const __mmask16 there = step < steps ? static_cast<__mmask16>((1u << count) - 1u) : __mmask16{0};
    return reinterpret<detail::HalfBits>(_mm256_maskz_loadu_epi16(there, from + step * stride));
  };
  return __builtin_convertvector(halves(2 * k + 1), StepPairs) << 16 |
         __builtin_convertvector(halves(2 * k), StepPairs);
#else
  const std::int64_t step = sizeof(T) == 2 ? (k ^ 1) : k;
  if (step >= steps || count == 0) return VectorOf<T>{};
  return load_some(from + step * stride, count);
#endif
}

// Where the lanes come from when two vectors of n lanes, in parts of q, interleave within each part; and when the parts
// with even numbers, or those with odd ones, are taken from both.
template <int n, int q>
constexpr int first_halves_of_parts(int lane) {
  return lane / q * q + lane % q / 2 + (lane % 2) * n;
}
template <int n, int q>
constexpr int second_halves_of_parts(int lane) {
  return first_halves_of_parts<n, q>(lane) + q / 2;
}
template <int q>
constexpr int even_parts(int lane) {
  return 2 * (lane / q) * q + lane % q;
}
template <int q>
constexpr int odd_parts(int lane) {
  return even_parts<q>(lane) + q;
}

// Transposes kElementLanes x kElementLanes elements: within the 128-bit parts of vectors, then the parts.
template <class T>
ESPALIER_SIMD_INLINE void transpose_elements(VectorOf<T> (&x)[kElementLanes<T>]) {
  using E = Packed<T>;
  constexpr int n = kElementLanes<T>, q = 16 / static_cast<int>(sizeof(E)), parts = ESPALIER_SIMD_BYTES / 16;
  VectorOf<T> y[n];
#pragma GCC unroll 2
  for (int round = 1; round < q; round *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < n / 2; ++i) {
      const int at = i / (q / 2) * q, j = i % (q / 2);
      y[at + 2 * j] = shuffled<first_halves_of_parts<n, q>>(x[at + j], x[at + j + q / 2]);
      y[at + 2 * j + 1] = shuffled<second_halves_of_parts<n, q>>(x[at + j], x[at + j + q / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) x[i] = y[i];
  }
#pragma GCC unroll 2
  for (int round = 1; round < parts; round *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < n / 2; ++i) {
      const int part = i / q, j = i % q;
      y[part * q + j] = shuffled<even_parts<q>>(x[2 * part * q + j], x[(2 * part + 1) * q + j]);
      y[(part + parts / 2) * q + j] = shuffled<odd_parts<q>>(x[2 * part * q + j], x[(2 * part + 1) * q + j]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) x[i] = y[i];
  }
}

// Packs lines [line, line + lines) of b, with numbers at `data`, as a panel; missing lines are 0.
template <class T, class From>
__attribute__((noinline)) void pack_panel(const Factor<T>& b, const From* data, std::int64_t line, std::int64_t lines,
                                          std::int64_t step, std::int64_t steps, Packed<T>* to) {
  constexpr int n = kElementLanes<T>, per = kStepsOfElement<T>;
  const std::int64_t elements = elements_of<T>(steps);
  if (!b.steps_adjacent) {
    const From* from = data + step * b.stride + line;
    for (std::int64_t k = 0; k < elements; ++k, to += kPanelColumns<T>)
      for (int v = 0; v < kPanelColumns<T>; v += n)
        store_packed(to + v, load_across<T>(from + v, b.stride, k, steps, lines - v));
    return;
  }
  for (std::int64_t k = 0; k < elements; k += n)
    for (int v = 0; v < kPanelColumns<T>; v += n) {
      VectorOf<T> square[n];
      const From* from = data + (line + v) * b.stride + step + k * per;
      Packed<T>* at = to + k * kPanelColumns<T> + v;
      if (v + n <= lines && k + n <= steps / per) {
#pragma GCC unroll 16
        for (int i = 0; i < n; ++i) {
          square[i] = load_along<T>(from + i * b.stride, n * per);
          __builtin_prefetch(from + (kPanelColumns<T> + i) * b.stride, 0, 2);  // the next panel
        }
        transpose_elements<T>(square);
#pragma GCC unroll 16
        for (int i = 0; i < n; ++i) store_packed(at + i * kPanelColumns<T>, square[i]);
      } else {
        VectorOf<T> edge[n];  // in memory, because it is indexed
        for (int i = 0; i < n; ++i)
          edge[i] = v + i < lines ? load_along<T>(from + i * b.stride, steps - k * per) : VectorOf<T>{};
        __builtin_memcpy(square, edge, sizeof(edge));
        transpose_elements<T>(square);
        __builtin_memcpy(edge, square, sizeof(edge));
        for (int i = 0; i < n && k + i < elements; ++i) store_packed(at + i * kPanelColumns<T>, edge[i]);
      }
    }
}

template <class T>
ESPALIER_SIMD_INLINE void pack_panel(const Factor<T>& b, std::int64_t line, std::int64_t lines, std::int64_t step,
                                     std::int64_t steps, Packed<T>* to) {
  if constexpr (std::is_same_v<T, float>)
    if (b.narrow != nullptr) return pack_panel(b, b.narrow, line, lines, step, steps, to);
  pack_panel(b, b.data, line, lines, step, steps, to);
}

// Packs rows of a for the tile; writes up to a vector after their last element.
template <class T>
__attribute__((noinline)) void pack_rows(const Factor<T>& a, std::int64_t row, std::int64_t rows, std::int64_t step,
                                         std::int64_t steps, Packed<T>* to) {
  constexpr int n = kElementLanes<T>, per = kStepsOfElement<T>;
  const std::int64_t elements = elements_of<T>(steps);
  if (a.steps_adjacent) {
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t k = 0; k < elements; k += n)
        store_packed(to + r * kRowStride<T> + k,
                     load_along<T>(a.data + (row + r) * a.stride + step + k * per, steps - k * per));
  } else {
    const T* from = a.data + step * a.stride + row;
    for (std::int64_t k = 0; k < elements; ++k, to += kSumRows)  // the next element overwrites the excess
      for (int v = 0; v < kSumRows; v += n)
        store_packed(to + v, load_across<T>(from + v, a.stride, k, steps, rows - v));
  }
}

// out = a b, or out += a b: rows x kSumVectors sums in registers.
template <class T, bool steps_adjacent, int rows, class A>
__attribute__((noinline)) void tile(std::int64_t elements, const Packed<T>* a, const Packed<T>* b, A* out,
                                    std::int64_t stride, bool add) {
  constexpr int n = kLanes<A>;
  Vector<A> sums[rows][kSumVectors] = {};
#pragma GCC unroll 14
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < kSumVectors; ++v) __builtin_prefetch(out + r * stride + v * n, 1);
#pragma GCC unroll 2
  for (std::int64_t k = 0; k < elements; ++k) {
    VectorOf<T> right[kSumVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kSumVectors; ++v) right[v] = load_packed(b + v * n);
    b += kPanelColumns<T>;
#pragma GCC unroll 14
    for (int r = 0; r < rows; ++r) {
      const auto left = everywhere(steps_adjacent ? a[r * kRowStride<T> + k] : a[r]);
#pragma GCC unroll 2
      for (int v = 0; v < kSumVectors; ++v) sums[r][v] = fma(left, right[v], sums[r][v]);
    }
    if (!steps_adjacent) a += kSumRows;
  }
#pragma GCC unroll 14
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kSumVectors; ++v) {
      A* to = out + r * stride + v * n;
      store(to, add ? load(to) + sums[r][v] : sums[r][v]);
    }
}

template <class T, bool steps_adjacent, int rows = kSumRows, class A>
ESPALIER_SIMD_INLINE void tile_of_rows(std::int64_t count, std::int64_t elements, const Packed<T>* a,
                                       const Packed<T>* b, A* out, std::int64_t stride, bool add) {
  if (count == rows) return tile<T, steps_adjacent, rows>(elements, a, b, out, stride, add);
  if constexpr (rows > 1) tile_of_rows<T, steps_adjacent, rows - 1>(count, elements, a, b, out, stride, add);
}

// The same for any number of columns up to a panel's.
template <class T, class A>
void tile_of(bool steps_adjacent, std::int64_t rows, std::int64_t columns, std::int64_t elements, const Packed<T>* a,
             const Packed<T>* b, A* out, std::int64_t stride, bool add) {
  A edge[kSumRows * kPanelColumns<T>];
  const bool whole = columns >= kPanelColumns<T>;
  A* to = whole ? out : edge;
  if (!whole) {
    __builtin_memset(edge, 0, sizeof(edge));
    for (std::int64_t r = 0; add && r < rows; ++r)
      __builtin_memcpy(edge + r * kPanelColumns<T>, out + r * stride, static_cast<std::size_t>(columns) * sizeof(A));
  }
  const std::int64_t to_stride = whole ? stride : kPanelColumns<T>;
  if (steps_adjacent)
    tile_of_rows<T, true>(rows, elements, a, b, to, to_stride, add);
  else
    tile_of_rows<T, false>(rows, elements, a, b, to, to_stride, add);
  for (std::int64_t r = 0; !whole && r < rows; ++r)
    __builtin_memcpy(out + r * stride, edge + r * kPanelColumns<T>, static_cast<std::size_t>(columns) * sizeof(A));
}

}  // namespace espalier::ESPALIER_SIMD
