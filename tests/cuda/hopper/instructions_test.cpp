// The emulation of sm_90a: copies and products give what the PTX ISA says, and each fault of a small pipeline is found.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "espalier/ops/cuda/hopper/products.h"
#include "tests/cuda/accesses.h"
#include "tests/cuda/hopper/expected_layouts.h"

namespace espalier::cuda::hopper {
namespace {

constexpr unsigned kSeeds[] = {0, 1, 2, 3, 4, 5, 8};
constexpr int kBox = 64;  // rows of the tests' tiles

// Whole numbers, so that sums are exact.
float number(int row, int column, int of) { return static_cast<float>((row * 7 + column * 5 + of) % 9 - 4); }

std::vector<bfloat16> matrix(int rows, int columns, int of) {
  std::vector<bfloat16> x(static_cast<std::size_t>(rows * columns) + 8);
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; ++c) x[static_cast<std::size_t>(r * columns + c)] = bfloat16(number(r, c, of));
  return x;
}
TensorMap map_of(const std::vector<bfloat16>& x, int rows, int columns, int box_rows = kBox) {
  TensorMap map;
  const std::string problem = emulation::encode_tensor_map(map, x.data(), rows, columns, columns * 2, box_rows);
  EXPECT_EQ(problem, "");
  return map;
}

using testing::Element;

// ---- places, as expected_layouts.h has them ----

TEST(Factors, AreNamedAsExpected) {
  emulation::run(emulation::WarpgroupLaunch{{{1}, {32}, 64 << 10}, 168}, [&] {
    if (threadIdx.x != 0) return;
    constexpr int kRows = 96;
    const std::uint64_t at = factor_at(place_of(shared_bytes()) + 1024, kPartBytes<kRows>);
    const auto field = [](std::uint64_t of, int from) { return static_cast<int>(of >> from & 0x3fff) << 4; };
    EXPECT_EQ(field(at, 0), 1024);
    EXPECT_EQ(field(at, 16), testing::part_bytes(kRows));
    EXPECT_EQ(field(at, 32), testing::kEightRowsBytes);
    EXPECT_EQ(at >> 46, std::uint64_t{testing::kSwizzle128} << 16);
    for (int n = 0; n < 8; ++n) {
      EXPECT_EQ(field(columns_further<kRows>(at, n), 0), 1024 + testing::bytes_columns_further(kRows, n));
      EXPECT_EQ(field(rows_further(at, n % 6), 0), 1024 + testing::bytes_rows_further(n % 6));
    }
  });
}

TEST(TensorLoad, WritesPartsOf64ColumnsSwizzledAndZerosOutside) {
  constexpr int kRows = 20, kColumns = 96, kBoxRows = 24;
  const std::vector<bfloat16> x = matrix(kRows, kColumns, 1);
  const TensorMap map = map_of(x, kRows, kColumns, kBoxRows);
  std::vector<std::uint16_t> got(2 * kBoxRows * 64);
  emulation::run(emulation::WarpgroupLaunch{{{1}, {32}, 2 * kBoxRows * 128 + 8}, 168}, [&] {
    const SharedPlace memory = place_of(shared_bytes()), barrier = memory + 2 * kBoxRows * 128;
    if (threadIdx.x == 0) {
      barrier_init(barrier, 1);
      barrier_init_fence();
      barrier_expect(barrier, 2 * kBoxRows * 128);
      load_tile<96, kBoxRows>(memory, map, barrier, 0, 3);
      barrier_wait(barrier, 0);
      std::memcpy(got.data(), memory, got.size() * 2);
    }
  });
  for (int r = 0; r < kBoxRows; ++r)
    for (int c = 0; c < 128; ++c) {
      const bool inside = r + 3 < kRows && c < kColumns;
      EXPECT_EQ(got[testing::byte_in_tile(kBoxRows, r, c) / 2],
                (inside ? bfloat16(number(r + 3, c, 1)) : bfloat16(0.f)).bits)
          << r << ", " << c;
    }
}

TEST(TensorMap, IsRefusedAsTheDriverRefusesIt) {
  alignas(16) const bfloat16 x[64] = {};
  TensorMap map;
  const auto problem = [&](const void* data, std::int64_t rows, std::int64_t stride, int box) {
    return emulation::encode_tensor_map(map, data, rows, 8, stride, box);
  };
  EXPECT_EQ(problem(x, 2, 16, 64), "");
  EXPECT_NE(problem(x + 1, 2, 16, 64), "");
  EXPECT_NE(problem(x, 2, 24, 64), "");
  EXPECT_NE(problem(x, 0, 16, 64), "");
  EXPECT_NE(problem(x, 2, 16, 257), "");
}

// x [64, 64] times y: y [N, 64] rows first, or y [64, N] columns first; x in shared memory or in registers.
template <int N, bool columns_first, bool in_registers>
void expect_product() {
  constexpr int kYRows = columns_first ? 64 : N, kYColumns = columns_first ? N : 64, kParts_ = (kYColumns + 63) / 64;
  const std::vector<bfloat16> x = matrix(64, 64, 1), y = matrix(kYRows, kYColumns, 2);
  const TensorMap map_x = map_of(x, 64, 64), map_y = map_of(y, kYRows, kYColumns, kYRows);
  constexpr int kTileY = kPartBytes<64>, kBarrier = kTileY + kParts_ * kPartBytes<kYRows>;
  std::vector<float> got(64 * N, -1e9f);
  emulation::run(emulation::WarpgroupLaunch{{{1}, {128}, kBarrier + 8}, 168}, [&] {
    const SharedPlace memory = place_of(shared_bytes()), barrier = memory + kBarrier;
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) {
      barrier_init(barrier, 1);
      barrier_init_fence();
      barrier_expect(barrier, kBarrier);
      load_tile<64, 64>(memory, map_x, barrier, 0, 0);
      load_tile<kYColumns, kYRows>(memory + kTileY, map_y, barrier, 0, 0);
    }
    __syncthreads();
    barrier_wait(barrier, 0);
    const std::uint64_t factor_x = factor_at(memory, 16),
                        factor_y = factor_at(memory + kTileY, columns_first ? kPartBytes<kYRows> : 16);
    float d[N / 2];
    wgmma_fence();
    for (int k = 0; k < 4; ++k) {
      const std::uint64_t of_y = columns_first ? rows_further(factor_y, k) : columns_further<kYRows>(factor_y, k);
      if constexpr (in_registers) {
        unsigned a[4][4];
        for (int i = 0; i < 4; ++i) {  // two columns of a row: as the results of a product of [64, 16]
          const Element at = testing::factor_element(thread, 2 * i);
          a[k][i] = packed(number(at.row, 16 * k + at.column, 1), number(at.row, 16 * k + at.column + 1, 1));
        }
        wgmma<N, columns_first>(d, a[k], of_y, k > 0);
        wgmma_commit();  // before the registers go
        wgmma_wait<0>();
        wgmma_fence();
      } else {
        wgmma<N, columns_first>(d, columns_further<64>(factor_x, k), of_y, k > 0);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    for (int i = 0; i < N / 2; ++i) {
      const Element at = testing::result_element(thread, i);
      got[static_cast<std::size_t>(at.row * N + at.column)] = d[i];
    }
  });
  for (int m = 0; m < 64; ++m)
    for (int n = 0; n < N; ++n) {
      float sum = 0;
      for (int k = 0; k < 64; ++k) sum += number(m, k, 1) * (columns_first ? number(k, n, 2) : number(n, k, 2));
      ASSERT_EQ(got[static_cast<std::size_t>(m * N + n)], sum) << m << ", " << n;
    }
}

TEST(Wgmma, MultipliesTheRowsThatItsFactorsName) {
  expect_product<64, false, false>();
  expect_product<176, false, false>();
  expect_product<80, false, true>();
}
TEST(Wgmma, MultipliesTheColumnsThatItsFactorsName) {
  expect_product<64, true, true>();
  expect_product<128, true, false>();
  expect_product<192, true, true>();
}

// ---- faults ----

enum class Wrong {
  nothing,
  init_unknown_to_copies,
  barrier_before_its_init,
  bytes_too_many,
  bytes_too_few,
  parity,
  stage_not_waited_for,
  stage_released_early,
  stage_not_emptied,
  no_wgmma_fence,
  no_commit,
  no_wait,
  results_read_early,
  factor_in_registers_changed,
  no_fence_for_products,
  no_named_barrier,
  named_barrier_of_other_count,
  warps_multiply_different_factors,
  swizzle,
  registers_fewer_than_before,
  no_fence_for_sums,
  sums_not_waited_for,
  misaligned_tile,
  shared_memory_left,
  tile_over_barriers,
  number_over_barrier
};

constexpr int kTiles = 4, kTile = kPartBytes<kBox>, kKeys = kTile, kMiddle = 3 * kTile, kSums = 4 * kTile,
              kBarriers = 6 * kTile, kRoom = kBarriers + kTile;

// acc [64, 64] = x (sum of kTiles tiles of y)^T, z = bf16(acc) x, added to `out` in bulk: two stages, a warp that
// copies and a warpgroup that multiplies.
void pipeline(const TensorMap& map_x, const TensorMap& map_y, float* out, Wrong wrong) {
  const auto is = [wrong](Wrong what) { return wrong == what; };
  const SharedPlace memory = place_of(shared_bytes()), barriers = memory + kBarriers;
  const auto full = [&](int stage) { return barriers + 8 * stage; };
  const auto empty = [&](int stage) { return barriers + 16 + 8 * stage; };
  const SharedPlace full_x = barriers + 32;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  if (thread == 0) {
    for (int s = 0; s < 2; ++s) {
      barrier_init(full(s), 1);
      barrier_init(empty(s), 4);
    }
    barrier_init(full_x, 1);
    if (!is(Wrong::init_unknown_to_copies)) barrier_init_fence();
  }
  if (!is(Wrong::barrier_before_its_init)) __syncthreads();
  if (warp < 4) {
    give_registers<24>();
    if (thread != 0) return;
    barrier_expect(full_x, kTile);
    const int place_x = is(Wrong::misaligned_tile) ? 128 : is(Wrong::tile_over_barriers) ? kBarriers : 0;
    tensor_load(memory + place_x, map_x, full_x, 0, 0);
    if (is(Wrong::number_over_barrier)) *reinterpret_cast<int*>(shared_bytes() + kBarriers) = 1;
    unsigned parity = is(Wrong::parity) ? 0 : 1;
    for (int n = 0; n < kTiles; ++n) {
      const int s = n % 2;
      if (!is(Wrong::stage_not_emptied)) barrier_wait(empty(s), parity);
      barrier_expect(full(s), kTile + (is(Wrong::bytes_too_many) ? 16 : is(Wrong::bytes_too_few) ? -16 : 0));
      tensor_load(memory + kKeys + s * kTile, map_y, full(s), 0, n * kBox);
      if (s == 1) parity ^= 1;
    }
    return;
  }
  is(Wrong::registers_fewer_than_before) ? take_registers<120>() : take_registers<232>();
  const int t = thread % 128;
  float acc[32], z[32];
  unsigned a[4][4];
  barrier_wait(full_x, 0);
  unsigned parity = 0;
  for (int n = 0; n < kTiles; ++n) {
    const int s = n % 2;
    if (!is(Wrong::stage_not_waited_for)) barrier_wait(full(s), parity);
    std::uint64_t factor = factor_at(memory + kKeys + s * kTile, 16);
    if (is(Wrong::swizzle)) factor ^= std::uint64_t{3} << 62;
    if (is(Wrong::shared_memory_left)) factor = factor_at(memory + kRoom - kTile / 2, 16);
    if (!is(Wrong::no_wgmma_fence)) wgmma_fence();
    for (int k = 0; k < 4; ++k) {
      const int of_warp = is(Wrong::warps_multiply_different_factors) && warp == 5 ? k ^ 1 : k;
      wgmma<64, false>(acc, columns_further<kBox>(factor_at(memory, 16), k), columns_further<kBox>(factor, of_warp),
                       n > 0 || k > 0);
    }
    if (!(is(Wrong::no_commit) && n == 3)) wgmma_commit();
    const auto release = [&] {
      __syncwarp();
      if (lane == 0) barrier_arrive(empty(s));
    };
    if (is(Wrong::stage_released_early)) release();
    if (is(Wrong::results_read_early)) z[0] = acc[0] += 1;
    if (!is(Wrong::no_wait)) wgmma_wait<0>();
    if (!is(Wrong::stage_released_early)) release();
    if (s == 1) parity ^= 1;
  }
  round_factor<64>(acc, a);
  for (int k = 0; k < 4; ++k) {
    const int row = warp % 4 * 16 + lane % 16, piece = 2 * k + lane / 16;
    stmatrix_x4<false>(memory + kMiddle + row * 128 + (piece ^ (row & 7)) * 16, a[k]);
  }
  if (!is(Wrong::no_fence_for_products)) async_fence();
  if (!is(Wrong::no_named_barrier)) named_wait(1, is(Wrong::named_barrier_of_other_count) && warp == 5 ? 96 : 128);
  wgmma_fence();
  for (int k = 0; k < 4; ++k) {
    // Half of the columns from shared memory, half from registers.
    if (k < 2)
      wgmma<64, true>(z, columns_further<kBox>(factor_at(memory + kMiddle, 16), k),
                      rows_further(factor_at(memory, kTile), k), k > 0);
    else
      wgmma<64, true>(z, a[k], rows_further(factor_at(memory, kTile), k), true);
  }
  wgmma_commit();
  if (is(Wrong::factor_in_registers_changed)) a[3][0] ^= 1;
  wgmma_wait<0>();
  float* const sums = reinterpret_cast<float*>(shared_bytes() + kSums) + t * 32;
  for (int i = 0; i < 32; ++i) sums[i] = z[i];
  if (!is(Wrong::no_fence_for_sums)) async_fence();
  named_wait(2, 128);
  if (t == 0) {
    bulk_add(out, memory + kSums, 2 * kTile);
    bulk_commit();
    if (!is(Wrong::sums_not_waited_for)) bulk_done<0>();
  }
}

struct Numbers {
  std::vector<bfloat16> x = matrix(64, 64, 1), y = matrix(kTiles * kBox, 64, 2);
};

std::vector<float> result_of(Wrong wrong, unsigned seed) {
  const Numbers numbers;
  const TensorMap map_x = map_of(numbers.x, 64, 64), map_y = map_of(numbers.y, kTiles * kBox, 64);
  std::vector<float> out(64 * 64, 1);
  emulation::set_seed(seed);
  emulation::run(emulation::WarpgroupLaunch{{{1}, {256}, kRoom}, 128},
                 [&] { pipeline(map_x, map_y, out.data(), wrong); });
  return out;
}

TEST(Pipeline, GivesTheSameExactResultInEveryOrder) {
  std::vector<float> wanted(64 * 64);
  std::vector<float> acc(64 * 64);
  for (int m = 0; m < 64; ++m)
    for (int n = 0; n < 64; ++n)
      for (int tile = 0; tile < kTiles; ++tile)
        for (int k = 0; k < 64; ++k)
          acc[static_cast<std::size_t>(m * 64 + n)] += number(m, k, 1) * number(tile * kBox + n, k, 2);
  for (int t = 0; t < 128; ++t)
    for (int i = 0; i < 32; ++i) {
      const Element at = testing::result_element(t, i);
      float sum = 1;
      for (int k = 0; k < 64; ++k)
        sum += static_cast<float>(bfloat16(acc[static_cast<std::size_t>(at.row * 64 + k)])) * number(k, at.column, 1);
      wanted[static_cast<std::size_t>(t * 32 + i)] = sum;
    }
  for (const unsigned seed : kSeeds) EXPECT_EQ(result_of(Wrong::nothing, seed), wanted) << "seed " << seed;
}

TEST(Registers, AreWaitedForWhereOthersHaveThem) {
  const auto launch = [](bool given) {
    emulation::run(emulation::WarpgroupLaunch{{{1}, {384}}, 168}, [given] {
      if (threadIdx.x >= 128)
        take_registers<240>();
      else if (given)
        give_registers<24>();
    });
  };
  for (const unsigned seed : kSeeds) {
    emulation::set_seed(seed);
    EXPECT_NO_THROW(launch(true)) << "seed " << seed;
    EXPECT_THROW(launch(false), emulation::Fault) << "seed " << seed;
  }
}

TEST(Pipeline, EachFaultIsFoundByName) {
  const std::pair<Wrong, const char*> all[] = {
      {Wrong::init_unknown_to_copies, "the copy engine does not know of"},
      {Wrong::barrier_before_its_init, "barrier"},
      {Wrong::bytes_too_many, "wait for ever"},
      {Wrong::bytes_too_few, "where a copy in flight|wait for ever|a copy in flight brings|phases have ended"},
      {Wrong::parity, "wait for ever"},
      {Wrong::stage_not_waited_for, "a copy in flight brings|nobody wrote|nothing orders the two"},
      {Wrong::stage_released_early, "what a product or a sum in flight reads|read, and nothing orders"},
      {Wrong::stage_not_emptied,
       "a copy to where another one is in flight|in flight reads|nothing orders|more arrivals"},
      {Wrong::no_wgmma_fence, "without a wgmma.fence"},
      {Wrong::no_commit, "a wrong result"},
      {Wrong::no_wait, "in flight were written|nobody waited for|in flight reads"},
      {Wrong::results_read_early, "results of a product in flight were written"},
      {Wrong::factor_in_registers_changed, "registers were written that a product in flight reads"},
      {Wrong::no_fence_for_products, "without a fence for products"},
      {Wrong::no_named_barrier, "nothing orders the two"},
      {Wrong::named_barrier_of_other_count, "counts"},
      {Wrong::warps_multiply_different_factors, "warps of a group multiply different factors"},
      {Wrong::swizzle, "a factor of another swizzle"},
      {Wrong::registers_fewer_than_before, "given by taking"},
      {Wrong::no_fence_for_sums, "without a fence for copies"},
      {Wrong::sums_not_waited_for, "sums in flight"},
      {Wrong::misaligned_tile, "no multiple of 1024"},
      {Wrong::shared_memory_left, "a factor outside of shared memory"},
      {Wrong::tile_over_barriers, "a copy to where a barrier is"},
      {Wrong::number_over_barrier, "where a barrier is"}};
  const std::vector<float> right = result_of(Wrong::nothing, 0);
  for (const auto& [wrong, text] : all) {
    int found = 0;
    std::string last = "no fault";
    for (const unsigned seed : kSeeds) {
      try {
        last = result_of(wrong, seed) == right ? "no fault" : "a wrong result";
        if (last == text) ++found;
      } catch (const emulation::Fault& fault) {
        last = fault.what();
        std::string rest = text;
        while (!rest.empty()) {
          const std::size_t end = std::min(rest.find('|'), rest.size());
          if (last.find(rest.substr(0, end)) != std::string::npos) {
            ++found;
            break;
          }
          rest = end < rest.size() ? rest.substr(end + 1) : "";
        }
      }
    }
    EXPECT_GT(found, 0) << "fault " << static_cast<int>(wrong) << ", wanted \"" << text << "\", last: " << last;
  }
}

}  // namespace
}  // namespace espalier::cuda::hopper
