// The twins of matrix instructions (ops/cuda/ptx.h) against two descriptions of the real ones: the PTX ISA's tables of
// fragments, and the layouts of CuTe's MMA_Traits<SM80_16x8x16_F32BF16BF16F32_TN>.
#include "espalier/ops/cuda/ptx.h"

#include <gtest/gtest.h>

#include <vector>

namespace espalier::cuda {
namespace {

struct Place {
  unsigned row, column;
  bool operator==(const Place&) const = default;
};

// "Matrix Fragments for mma.m16n8k16 with floating point type", of element i of lane l.
Place a_of_isa(unsigned l, unsigned i) {
  const unsigned group = l >> 2, within = l % 4;
  return {i < 2 || (i >= 4 && i < 6) ? group : group + 8, within * 2 + (i & 1) + (i >= 4 ? 8 : 0)};
}
Place b_of_isa(unsigned l, unsigned i) { return {l % 4 * 2 + (i & 1) + (i >= 2 ? 8 : 0), l >> 2}; }
Place c_of_isa(unsigned l, unsigned i) { return {i < 2 ? l >> 2 : (l >> 2) + 8, l % 4 * 2 + (i & 1)}; }

// Offset of a layout ((4, 8), (2, 2, 2)) : ((t0, t1), (v0, v1, v2)) at thread l, value i; in columns of `rows`
// elements.
struct CuteLayout {
  unsigned t0, t1, v0, v1, v2, rows;
  Place at(unsigned l, unsigned i) const {
    const unsigned offset = l % 4 * t0 + l / 4 * t1 + i % 2 * v0 + i / 2 % 2 * v1 + i / 4 * v2;
    return {offset % rows, offset / rows};
  }
};
constexpr CuteLayout kA{32, 1, 16, 8, 128, 16}, kB{16, 1, 8, 64, 0, 8}, kC{32, 1, 16, 8, 0, 16};

TEST(Fragments, OfTheIsaAreThoseOfCute) {
  for (unsigned l = 0; l < 32; ++l) {
    for (unsigned i = 0; i < 8; ++i) EXPECT_EQ(a_of_isa(l, i), kA.at(l, i)) << l << ", " << i;
    for (unsigned i = 0; i < 4; ++i) {
      const Place b = b_of_isa(l, i);
      EXPECT_EQ((Place{b.column, b.row}), kB.at(l, i)) << l << ", " << i;  // CuTe's B is [n, k]
      EXPECT_EQ(c_of_isa(l, i), kC.at(l, i)) << l << ", " << i;
    }
  }
}

float number(unsigned row, unsigned column, unsigned of) {
  return static_cast<float>((row * 7 + column * 5 + of) % 13) - 6;
}

TEST(Mma, MultipliesWhatTheFragmentsHold) {
  std::vector<float> result(16 * 8, -1e9f);
  emulation::run({{1}, {32}}, [&] {
    const unsigned l = threadIdx.x;
    const auto pair = [l](Place (*place)(unsigned, unsigned), unsigned r, unsigned of) {
      const Place low = place(l, 2 * r), high = place(l, 2 * r + 1);
      return packed(number(low.row, low.column, of), number(high.row, high.column, of));
    };
    unsigned a[4];
    for (unsigned r = 0; r < 4; ++r) a[r] = pair(a_of_isa, r, 1);
    float d[4];
    for (unsigned i = 0; i < 4; ++i) d[i] = number(c_of_isa(l, i).row, c_of_isa(l, i).column, 3);
    mma_16816(d, a, pair(b_of_isa, 0, 2), pair(b_of_isa, 1, 2));
    for (unsigned i = 0; i < 4; ++i) result[c_of_isa(l, i).row * 8 + c_of_isa(l, i).column] = d[i];
  });
  for (unsigned m = 0; m < 16; ++m)
    for (unsigned n = 0; n < 8; ++n) {
      float sum = number(m, n, 3);
      for (unsigned k = 0; k < 16; ++k) sum += number(m, k, 1) * number(k, n, 2);
      EXPECT_EQ(result[m * 8 + n], sum) << m << ", " << n;  // whole numbers: exact
    }
}

// Lane l receives of matrix r the elements (l / 4, 2 (l % 4)) and the next; with .trans of its transpose.
template <bool transposed>
void expect_loads() {
  std::vector<std::uint16_t> got(32 * 8);
  emulation::run({{1}, {32}}, [&] {
    ESPALIER_SHARED(bfloat16[4 * 64], shared);
    for (unsigned i = threadIdx.x; i < 256; i += 32) shared[i].bits = static_cast<std::uint16_t>(i);
    __syncwarp();
    unsigned r[4];
    ldmatrix_x4<transposed>(r, place_of(shared + threadIdx.x * 8));
    for (unsigned m = 0; m < 4; ++m)
      for (unsigned i = 0; i < 2; ++i)
        got[threadIdx.x * 8 + m * 2 + i] = static_cast<std::uint16_t>(i == 0 ? r[m] & 0xffff : r[m] >> 16);
  });
  for (unsigned l = 0; l < 32; ++l)
    for (unsigned m = 0; m < 4; ++m)
      for (unsigned i = 0; i < 2; ++i) {
        const unsigned row = l / 4, column = l % 4 * 2 + i;
        EXPECT_EQ(got[l * 8 + m * 2 + i], m * 64 + (transposed ? column * 8 + row : row * 8 + column))
            << l << ", " << m;
      }
}
TEST(Ldmatrix, GivesEachLaneItsElements) { expect_loads<false>(); }
TEST(Ldmatrix, TransposedGivesThoseOfTheTranspose) { expect_loads<true>(); }

// 4 or 16 bytes, or zeros where nothing is inside.
TEST(CpAsync, BringsItsBytesOrZeros) {
  std::vector<std::uint16_t> got(20);
  alignas(16) static const std::uint16_t from[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  emulation::run({{1}, {32}}, [&] {
    struct alignas(16) Room {
      std::uint16_t x[20];
    };
    ESPALIER_SHARED(Room, room);
    if (threadIdx.x != 0) return;
    cp_async<16>(place_of(room.x), from, true);
    cp_async<16>(place_of(room.x + 8), from, false);
    cp_async<4>(place_of(room.x + 16), from + 2, true);
    cp_async<4>(place_of(room.x + 18), from + 2, false);
    cp_async_commit();
    cp_async_wait<0>();
    std::copy_n(room.x, 20, got.begin());
  });
  EXPECT_EQ(got, (std::vector<std::uint16_t>{1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0, 3, 4, 0, 0}));
}

}  // namespace
}  // namespace espalier::cuda
