// expected_layouts.h against CuTe's layouts and descriptors (BSD-3-Clause headers of the package nvidia-cutlass): built
// where the headers are found.
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

#include <cutlass/bfloat16.h>
#include <gtest/gtest.h>

#include <cstdint>

#include "tests/cuda/hopper/expected_layouts.h"

namespace espalier::testing {
namespace {

using namespace cute;
using Element16 = cutlass::bfloat16_t;
namespace gmma = cute::SM90::GMMA;

alignas(1024) char memory[256 * 256 * 2];

std::size_t byte_of(const Element16* at) {
  return static_cast<std::size_t>(reinterpret_cast<const char*>(at) - memory);
}

template <int kRows, int kColumns>
void expect_tiles() {
  auto* const begin = reinterpret_cast<Element16*>(memory);
  auto rows = make_tensor(make_smem_ptr(begin),
                          tile_to_shape(gmma::Layout_K_SW128_Atom<Element16>{}, Shape<Int<kRows>, Int<kColumns>>{}));
  auto columns = make_tensor(make_smem_ptr(begin), tile_to_shape(gmma::Layout_MN_SW128_Atom<Element16>{},
                                                                 Shape<Int<kColumns>, Int<kRows>>{}, Step<_2, _1>{}));
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kColumns; ++c) {
      ASSERT_EQ(byte_of(raw_pointer_cast(&rows(r, c))), byte_in_tile(kRows, r, c)) << r << ", " << c;
      ASSERT_EQ(byte_of(raw_pointer_cast(&columns(c, r))), byte_in_tile(kRows, r, c)) << r << ", " << c;
    }
  // Descriptors: a factor of 16 columns read rows first, and of 16 rows read columns first.
  const auto of_columns = [&](int n) { return local_tile(rows, Shape<Int<kRows>, _16>{}, make_coord(0, n)); };
  const auto of_rows = [&](int n) { return local_tile(columns, Shape<Int<kColumns>, _16>{}, make_coord(0, n)); };
  const auto first = gmma::make_gmma_desc<gmma::Major::K>(of_columns(0));
  EXPECT_EQ(int{first.bitfield.stride_byte_offset_}, kEightRowsBytes >> 4);
  EXPECT_EQ(int{first.bitfield.layout_type_}, kSwizzle128);
  EXPECT_EQ(int{first.bitfield.base_offset_}, 0);
  const auto other = gmma::make_gmma_desc<gmma::Major::MN>(of_rows(0));
  EXPECT_EQ(int{other.bitfield.stride_byte_offset_}, kEightRowsBytes >> 4);
  EXPECT_EQ(int{other.bitfield.layout_type_}, kSwizzle128);
  if (kColumns > 64) {
    EXPECT_EQ(int{other.bitfield.leading_byte_offset_}, part_bytes(kRows) >> 4);
  }
  for (int n = 1; n < kColumns / 16; ++n)
    EXPECT_EQ(byte_of(raw_pointer_cast(of_columns(n).data())),
              static_cast<std::size_t>(bytes_columns_further(kRows, n)));
  for (int n = 1; n < kRows / 16; ++n)
    EXPECT_EQ(byte_of(raw_pointer_cast(of_rows(n).data())), static_cast<std::size_t>(bytes_rows_further(n)));
}

// The tiles of the kernels: queries, keys of the forward, keys of the gradients of queries.
TEST(Tiles, HaveTheLayoutsAndNamesOfCute) {
  expect_tiles<128, 128>();
  expect_tiles<64, 64>();
  expect_tiles<64, 128>();
  expect_tiles<176, 128>();
  expect_tiles<192, 64>();
  expect_tiles<112, 192>();
  expect_tiles<80, 256>();
  expect_tiles<96, 128>();
}

TEST(Registers, HaveTheElementsOfCute) {
  using Traits = MMA_Traits<SM90_64x128x16_F32BF16BF16_RS<gmma::Major::K, gmma::Major::MN>>;
  for (int t = 0; t < 128; ++t) {
    for (int i = 0; i < 64; ++i) {
      const int at = Traits::CLayout{}(t, i);  // columns of 64
      const Element of = result_element(t, i);
      EXPECT_TRUE(at % 64 == of.row && at / 64 == of.column) << t << ", " << i;
    }
    for (int i = 0; i < 8; ++i) {
      const int at = Traits::ALayout{}(t, i);
      const Element of = factor_element(t, i);
      EXPECT_TRUE(at % 64 == of.row && at / 64 == of.column) << t << ", " << i;
    }
  }
}

}  // namespace
}  // namespace espalier::testing
