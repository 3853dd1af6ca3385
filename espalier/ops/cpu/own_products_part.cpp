// One thread's part of a product, for one instruction set. Contract: own_products.h.
//
// Panels of b that fill half of a second-level cache are packed once and meet all rows, in tiles that are as even as
// can be: 16 rows are 8 and 8.
#include "espalier/base/defined_sums.h"
#include "espalier/base/nf4.h"
#include "espalier/base/quantised_rows.h"
#include "espalier/ops/cpu/own_products_tile.h"

namespace espalier::ESPALIER_SIMD {
namespace {

constexpr std::int64_t kPanelBytes = 512 << 10;
constexpr std::int64_t kRoundedRows = 512;  // rows of float32 sums that are kept until they are rounded

// A thread's memory: rows of a, panels of b, and sums that are rounded when they are whole.
template <class T, class Out>
struct Room {
  using A = accumulator_t<T>;
  static constexpr bool kRounds = sizeof(Out) < sizeof(A);
  static constexpr std::int64_t kRowElements = kSumRows * kRowStride<T> + 2 * kElementLanes<T>;
  static constexpr std::int64_t kPanelElements = kBlockElements<T> * kPanelColumns<T>;
  static constexpr std::int64_t kPanels = kPanelBytes / (kPanelElements * static_cast<std::int64_t>(sizeof(Packed<T>)));
  static constexpr std::int64_t kSumColumns = kPanels * kPanelColumns<T>;
  static constexpr std::size_t kRowBytes = (kRowElements * sizeof(Packed<T>) + 63) / 64 * 64;
  static constexpr std::size_t kSumBytes =
      kRounds ? static_cast<std::size_t>(kRoundedRows * kSumColumns) * sizeof(A) : 0;
  static constexpr std::size_t kBytes = kRowBytes + static_cast<std::size_t>(kPanelBytes) + kSumBytes +
                                        static_cast<std::size_t>(kPanelColumns<T> * kSumBlock<T>) * sizeof(T);
  static_assert(kBytes <= static_cast<std::size_t>(kOwnProductBytes));

  explicit Room(void* scratch)
      : rows(static_cast<Packed<T>*>(scratch)),
        panels(reinterpret_cast<Packed<T>*>(static_cast<char*>(scratch) + kRowBytes)),
        sums(reinterpret_cast<A*>(static_cast<char*>(scratch) + kRowBytes + kPanelBytes)),
        numbers(reinterpret_cast<T*>(static_cast<char*>(scratch) + kRowBytes + kPanelBytes + kSumBytes)) {}

  Packed<T>*rows, *panels;
  A* sums;
  T* numbers;  // of one panel, where b is quantised
};

// Asks for part `index` of `parts` of the rows that are packed next.
template <class T>
ESPALIER_SIMD_INLINE void prefetch_rows(const Factor<T>& a, std::int64_t row, std::int64_t rows, std::int64_t step,
                                        std::int64_t steps, std::int64_t index, std::int64_t parts) {
  if (rows <= 0) return;
  if (a.steps_adjacent) {
    for (std::int64_t r = row + rows * index / parts; r < row + rows * (index + 1) / parts; ++r)
      for (std::int64_t k = 0; k < steps; k += 64 / static_cast<std::int64_t>(sizeof(T)))
        __builtin_prefetch(a.data + r * a.stride + step + k, 0, 2);
  } else {
    for (std::int64_t k = step + steps * index / parts; k < step + steps * (index + 1) / parts; ++k) {
      __builtin_prefetch(a.data + k * a.stride + row, 0, 2);
      __builtin_prefetch(a.data + k * a.stride + row + rows - 1, 0, 2);
    }
  }
}

template <class In, class To>
void copy_numbers(std::int64_t rows, std::int64_t columns, const In* from, std::int64_t from_stride, To* to,
                  std::int64_t to_stride) {
  for (std::int64_t r = 0; r < rows; ++r)
    for_lanes<To>(columns, [&](std::int64_t i, int count) {
      store_some(to + r * to_stride + i, load_some(from + r * from_stride + i, count), count);
    });
}

// Numbers [first, first + count) of a row in NF4; `first` is even.
template <class T>
void unpack_nf4(const std::byte* row, std::int64_t first, std::int64_t count, T* to) {
  constexpr std::int64_t kBlocks = 4;  // whose values are made at a time
  float values[kBlocks * 16];
  T numbers[kBlocks * 16];
  const std::uint8_t* const codes = nf4::codes_of(row);
  for (std::int64_t end = first + count; first < end;) {
    const std::int64_t block = first / nf4::kBlock, blocks = smaller(kBlocks, parts_of(end, nf4::kBlock) - block);
    nf4::block_values(row, block, blocks, values);
    if constexpr (sizeof(T) == sizeof(double)) {
      for (std::int64_t k = 0; k < blocks * 16; ++k) numbers[k] = values[k];
    } else {
      for (std::int64_t k = 0; k < blocks * 16; k += kLanes<float>) store(numbers + k, load(values + k));
    }
    const T* of_block = numbers;
    for (std::int64_t b = block; b < block + blocks; ++b, of_block += 16) {
      std::int64_t i = first;
      const std::int64_t last = smaller(end, (b + 1) * nf4::kBlock);
#if ESPALIER_SIMD_BYTES == 64
      // The forms with a mask, of all lanes: GCC warns of an undefined operand in the others.
      const auto table = reinterpret<__m512>(load(values + (b - block) * 16));
      for (; sizeof(T) < sizeof(double) && i + 16 <= last; i += 16, to += 16) {
        const __m128i pairs = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i / 2)), low = _mm_set1_epi8(15),
                      code = _mm_unpacklo_epi8(_mm_and_si128(_mm_srli_epi16(pairs, 4), low), _mm_and_si128(pairs, low));
        const __m512i index = _mm512_maskz_cvtepu8_epi32(0xffff, code);
        if constexpr (sizeof(T) < sizeof(double))
          store(to, reinterpret<FloatVector>(_mm512_maskz_permutexvar_ps(0xffff, index, table)));
      }
#endif
      for (; i < last; ++i, ++to) *to = of_block[i % 2 == 0 ? codes[i / 2] >> 4 : codes[i / 2] & 15];
      first = last;
    }
  }
}

// The same of a row in any form.
template <class T>
void unpack_row(const std::byte* row, std::int64_t first, std::int64_t count, T* to) {
  if (quantised::header_of(row).kind == quantised::Kind::nf4) return unpack_nf4(row, first, count, to);
  constexpr std::int64_t kAtOnce = 256;
  float values[kAtOnce];
  for (std::int64_t end = first + count; first < end; first += kAtOnce, to += kAtOnce) {
    const std::int64_t here = smaller(kAtOnce, end - first);
    quantised::row_values(row, first, here, values);
    if constexpr (sizeof(T) == sizeof(double)) {
      for (std::int64_t i = 0; i < here; ++i) to[i] = values[i];
    } else {
      copy_numbers(1, here, values, 0, to, 0);
    }
  }
}

// pack_panel, of numbers that are first made where b is quantised.
template <class T, class Out>
void pack_columns(const Factor<T>& b, std::int64_t column, std::int64_t columns, std::int64_t step, std::int64_t steps,
                  const Room<T, Out>& room, Packed<T>* to) {
  if (b.quantised == nullptr) return pack_panel(b, column, columns, step, steps, to);
  const std::int64_t width = smaller(columns, kPanelColumns<T>);
  if (b.steps_adjacent) {
    for (std::int64_t i = 0; i < width; ++i)
      unpack_row(b.quantised + (column + i) * b.stride, step, steps, room.numbers + i * kSumBlock<T>);
    return pack_panel(Factor<T>{room.numbers, kSumBlock<T>, true}, 0, width, 0, steps, to);
  }
  for (std::int64_t k = 0; k < steps; ++k)
    unpack_row(b.quantised + (step + k) * b.stride, column, width, room.numbers + k * kPanelColumns<T>);
  pack_panel(Factor<T>{room.numbers, kPanelColumns<T>, false}, 0, width, 0, steps, to);
}

// Where a block of steps begins in the panels of a whole factor.
template <class T>
std::int64_t block_offset(std::int64_t columns, std::int64_t step) {
  return step / kStepsOfElement<T> * parts_of(columns, kPanelColumns<T>) * kPanelColumns<T>;
}

template <class T>
std::int64_t panel_bytes(std::int64_t columns, std::int64_t steps) {
  const std::int64_t last = (steps - 1) / kSumBlock<T> * kSumBlock<T>;
  const std::int64_t width = parts_of(columns, kPanelColumns<T>) * kPanelColumns<T>;
  return (block_offset<T>(columns, last) + elements_of<T>(steps - last) * width) *
         static_cast<std::int64_t>(sizeof(Packed<T>));
}

template <class T>
void pack(const Factor<T>& b, std::int64_t columns, std::int64_t steps, void* to) {
  auto* const panels = static_cast<Packed<T>*>(to);
  for (std::int64_t step = 0; step < steps; step += kSumBlock<T>) {
    const std::int64_t count = smaller(kSumBlock<T>, steps - step), elements = elements_of<T>(count);
    for (std::int64_t c = 0; c < columns; c += kPanelColumns<T>)
      pack_panel(b, c, columns - c, step, count, panels + block_offset<T>(columns, step) + c * elements);
  }
}

// sums (+)= a b for rows and columns of which panels fit into the room.
template <class T, class Out, class A>
void add_blocks(const Product<T, Out>& p, Range rows, Range columns, bool onto, const Room<T, Out>& room, A* sums,
                std::int64_t stride) {
  const std::int64_t count = rows.end - rows.begin, tiles = parts_of(count, kSumRows);
  const std::int64_t panels = parts_of(columns.end - columns.begin, kPanelColumns<T>);
  for (std::int64_t step = 0; step < p.steps; step += kSumBlock<T>) {
    const std::int64_t steps = smaller(kSumBlock<T>, p.steps - step), elements = elements_of<T>(steps);
    const Packed<T>* b = room.panels;
    if (p.b.panels != nullptr)
      b = static_cast<const Packed<T>*>(p.b.panels) + block_offset<T>(p.columns, step) + columns.begin * elements;
    for (std::int64_t c = columns.begin; p.b.panels == nullptr && c < columns.end; c += kPanelColumns<T>)
      pack_columns(p.b, c, columns.end - c, step, steps, room, room.panels + (c - columns.begin) * elements);
    for (std::int64_t t = 0; t < tiles; ++t) {
      const std::int64_t first = rows.begin + t * count / tiles, end = rows.begin + (t + 1) * count / tiles;
      pack_rows(p.a, first, end - first, step, steps, room.rows);
      for (std::int64_t c = columns.begin; c < columns.end; c += kPanelColumns<T>) {
        prefetch_rows(p.a, end, smaller(end - first, rows.end - end), step, steps,
                      (c - columns.begin) / kPanelColumns<T>, panels);
        tile_of<T>(p.a.steps_adjacent, end - first, columns.end - c, elements, room.rows,
                   b + (c - columns.begin) * elements, sums + (first - rows.begin) * stride + (c - columns.begin),
                   stride, onto || step > 0);
      }
    }
  }
}

template <class T, class Out>
void part(const Product<T, Out>& p, Range rows, Range columns, void* scratch) {
  using R = Room<T, Out>;
  const R room(scratch);
  const bool few = rows.end - rows.begin <= 2 * kSumRows && p.b.panels == nullptr;
  const std::int64_t columns_at_once = kPanelColumns<T> * (few ? smaller(4, R::kPanels) : R::kPanels);
  const std::int64_t rows_at_once = R::kRounds ? kRoundedRows : rows.end - rows.begin;
  for (std::int64_t row = rows.begin; row < rows.end; row += rows_at_once)
    for (std::int64_t column = columns.begin; column < columns.end; column += columns_at_once) {
      const Range r{row, smaller(row + rows_at_once, rows.end)},
          c{column, smaller(column + columns_at_once, columns.end)};
      const std::int64_t height = r.end - r.begin, width = c.end - c.begin;
      Out* out = p.out + row * p.out_stride + column;
      const Out* base = p.base ? p.base + row * p.base_stride + column : nullptr;
      if constexpr (R::kRounds) {
        if (base) copy_numbers(height, width, base, p.base_stride, room.sums, R::kSumColumns);
        add_blocks(p, r, c, base != nullptr, room, room.sums, R::kSumColumns);
        copy_numbers(height, width, room.sums, R::kSumColumns, out, p.out_stride);
      } else {
        if (base && base != out) copy_numbers(height, width, base, p.base_stride, out, p.out_stride);
        add_blocks(p, r, c, base != nullptr, room, out, p.out_stride);
      }
    }
}

}  // namespace

template <class T, class Out>
own_products::Kernel<T, Out> own_product_kernel() {
  return {kPanelColumns<T>, part<T, Out>, panel_bytes<T>, pack<T>};
}
#ifndef ESPALIER_BFLOAT16_DOT
template own_products::Kernel<float, float> own_product_kernel();
template own_products::Kernel<double, double> own_product_kernel();
#endif
template own_products::Kernel<bfloat16, bfloat16> own_product_kernel();
template own_products::Kernel<bfloat16, float> own_product_kernel();

}  // namespace espalier::ESPALIER_SIMD
