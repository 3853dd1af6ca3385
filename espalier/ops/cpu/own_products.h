// Matrix products whose sums have one defined order. The bits of a result's row do not depend on the other rows, nor on
// the split of work over threads, tiles and vectors.
//
//   out_ln = base_ln + sum_k a_lk b_nk
// The order: steps k are cut into blocks of kSumBlock<T>, from 0 on. A block is one chain of fused multiply-adds from
// 0, k ascending; bfloat16 takes the steps of each pair (2 i, 2 i + 1) in the order 2 i + 1, 2 i, as the AVX512_BF16
// instructions do. Blocks are added in ascending order to base, or, where there is none, to the first block. The sum is
// of accumulator_t<T>; a result in bfloat16 is rounded once, at the end. The baseline set has no fused multiply-adds
// and rounds each product as well, so its results differ. The AVX512_BF16 instructions
// take subnormal factors and sums as 0.
#pragma once

#include <cstddef>
#include <cstdint>

#include "espalier/base/dtype.h"

namespace espalier::own_products {

template <class T>
inline constexpr std::int64_t kSumBlock = 2048 / static_cast<std::int64_t>(sizeof(T));

// Number (line, step): data[line * stride + step] where steps are adjacent, else data[step * stride + line].
template <class T>
struct Factor {
  const T* data;
  std::int64_t stride;
  bool steps_adjacent;
  const void* panels = nullptr;          // b only: the same numbers packed by pack_panels; null: the product packs them
  const bfloat16* narrow = nullptr;      // float b only: narrow numbers to widen, instead of data
  const std::byte* quantised = nullptr;  // b only: rows of base/quantised_rows.h instead of data, `stride` bytes apart
};

// T: type of the factors; Out: T, or accumulator_t<T>. Rows of out and base are contiguous. base may be null, and may
// be out.
template <class T, class Out>
struct Product {
  std::int64_t rows, columns, steps;
  Factor<T> a, b;  // lines of a are rows, lines of b are columns
  const Out* base;
  std::int64_t base_stride;
  Out* out;
  std::int64_t out_stride;
};

struct Range {
  std::int64_t begin, end;
};

// The functions of an instruction set. Columns of a part begin at multiples of `panel`; scratch is 64-byte aligned.
template <class T, class Out>
struct Kernel {
  std::int64_t panel;
  void (*part)(const Product<T, Out>& product, Range rows, Range columns, void* scratch);
  std::int64_t (*panel_bytes)(std::int64_t columns, std::int64_t steps);
  void (*pack)(const Factor<T>& b, std::int64_t columns, std::int64_t steps, void* to);
};

// Overwrites out. Threads share the columns, or the rows if there are few columns. `threads`: the most threads used.
template <class T, class Out>
void multiply(const Product<T, Out>& product, int threads);

// Packs a whole factor in the order of the kernels, for products with few rows, where packing takes longer than
// multiplying. `to` is aligned to 64 bytes.
template <class T>
std::int64_t panel_bytes(std::int64_t columns, std::int64_t steps);
template <class T>
void pack_panels(const Factor<T>& b, std::int64_t columns, std::int64_t steps, void* to);

}  // namespace espalier::own_products
