// Blocks that are on the GPU together and add to the same sums in turn (query_sums.h): their order, and the faults that
// the emulation has to see.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "espalier/ops/cuda/hopper/query_sums.h"

namespace espalier::cuda::hopper {
namespace {

constexpr std::array<unsigned, 5> kSeeds{0, 1, 2, 3, 4};

// The number that a block adds to each number of a tile. In float32 the sum of all blocks depends on their order.
float part_of(int block, int tile) {
  return static_cast<float>(1 + tile) * (block % 2 == 0 ? 1.f : 3e-8f) * (1.f + 0.37f * static_cast<float>(block));
}

// The blocks that add to a tile, the first one first: those that begin with it or before it, then around the circle.
std::vector<int> order_of(int tile, int blocks, int tiles) {
  std::vector<int> order;
  for (int step = 0; step < tiles; ++step)
    for (int block = 0; block < blocks; ++block)
      if ((block + step) % tiles == tile) order.push_back(block);
  return order;
}

TEST(Circle, NumbersTheBlocksOfATileByTheStepsThatTheyTakeToIt) {
  for (const int blocks : {1, 2, 3, 5})
    for (const int tiles : {blocks, blocks + 1, 2 * blocks + 3})
      for (int tile = 0; tile < tiles; ++tile) {
        const std::vector<int> order = order_of(tile, blocks, tiles);
        ASSERT_EQ(order.size(), static_cast<std::size_t>(blocks));
        for (int turn = 0; turn < blocks; ++turn)
          EXPECT_EQ((Circle{tiles, blocks}.turn(order[static_cast<std::size_t>(turn)], tile)), turn)
              << blocks << " blocks, " << tiles << " tiles, tile " << tile;
      }
}

enum class Wrong { nothing, no_turn, no_wait_for_sums, turn_not_passed, no_fence, another_start };

constexpr int kHeads = 2, kTiles = 2, kBlocks = 3, kNumbers = kSumBytes / 4;
constexpr int kFull = kSumBytes, kEmpty = kFull + 8, kRoom = kEmpty + 8;

// A warpgroup fills the place of sums for each tile, and one thread of another adds it, as add_sums does.
void add_all(QuerySums sums, Wrong wrong) {
  const auto is = [wrong](Wrong what) { return wrong == what; };
  const SharedPlace memory = place_of(shared_bytes()), full = memory + kFull, empty = memory + kEmpty;
  const Circle circle{kHeads * kTiles, kBlocks};
  const int block = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    barrier_init(full, 4);
    barrier_init(empty, 1);
    barrier_init_fence();
  }
  __syncthreads();
  if (thread == 0) {
    if (is(Wrong::nothing)) return add_sums(sums, circle, block, 0, memory, {full, empty});
    int tile = block;
    for (int n = 0; n < circle.tiles; ++n) {
      barrier_wait(full, static_cast<unsigned>(n % 2));
      const int turn = circle.turn(block, tile);
      if (!is(Wrong::no_turn)) turn_wait(sums.turns + tile, is(Wrong::another_start) ? circle.blocks - turn : turn);
      bulk_add(sums.data + tile * kNumbers, memory, kSumBytes);
      bulk_commit();
      bulk_read<0>();
      barrier_arrive(empty);
      if (!is(Wrong::no_wait_for_sums)) bulk_done<0>();
      if (!is(Wrong::turn_not_passed)) turn_pass(sums.turns + tile);
      if (is(Wrong::no_wait_for_sums)) bulk_done<0>();
      if (++tile == circle.tiles) tile = 0;
    }
    return;
  }
  if (thread < kGroupThreads) return;
  unsigned parity = 1;
  for (int n = 0; n < circle.tiles; ++n, parity ^= 1) {
    barrier_wait(empty, parity);
    float* const to = reinterpret_cast<float*>(shared_bytes());
    for (int i = thread - kGroupThreads; i < kNumbers; i += kGroupThreads)
      to[i] = part_of(block, (block + n) % circle.tiles);
    if (!is(Wrong::no_fence)) async_fence();
    release(full);
  }
}

std::vector<float> sums_with(Wrong wrong, unsigned seed, unsigned together = kBlocks) {
  std::vector<float> data(static_cast<std::size_t>(kHeads * kTiles * kNumbers), 0.f);
  std::vector<int> turns(kHeads * kTiles, 0);
  emulation::set_seed(seed);
  emulation::run(emulation::WarpgroupLaunch{{{kBlocks}, {2 * kGroupThreads}, kRoom}, 128, together}, [&] {
    add_all({data.data(), turns.data(), kTiles, 0}, wrong);
  });
  return data;
}

TEST(Turns, GiveTheSameSumsInEveryOrderOfThreads) {
  for (const unsigned seed : kSeeds) {
    const std::vector<float> sums = sums_with(Wrong::nothing, seed);
    for (int tile = 0; tile < kHeads * kTiles; ++tile) {
      float wanted = 0;
      for (const int block : order_of(tile, kBlocks, kHeads * kTiles)) wanted += part_of(block, tile);
      const auto begin = sums.begin() + tile * kNumbers;
      EXPECT_TRUE(std::all_of(begin, begin + kNumbers, [&](float x) { return x == wanted; })) << seed << ' ' << tile;
    }
  }
}

TEST(Turns, EachFaultIsFoundInEveryOrderOfThreads) {
  const std::pair<Wrong, const char*> all[] = {{Wrong::no_turn, "nothing orders the two"},
                                               {Wrong::no_wait_for_sums, "nothing orders the two"},
                                               {Wrong::turn_not_passed, "wait for ever"},
                                               {Wrong::no_fence, "without a fence for copies"},
                                               {Wrong::another_start, "wait for ever"}};
  for (const auto& [wrong, text] : all)
    for (const unsigned seed : kSeeds) {
      std::string said = "no fault";
      try {
        sums_with(wrong, seed);
      } catch (const emulation::Fault& fault) {
        said = fault.what();
      }
      EXPECT_NE(said.find(text), std::string::npos) << static_cast<int>(wrong) << ", seed " << seed << ": " << said;
    }
}

// Blocks that wait for each other never end where one of them finds no room, and a GPU refuses to start them.
TEST(Turns, NeedAllBlocksOnTheGpu) {
  const unsigned before = emulation::set_most_together(kBlocks - 1);
  EXPECT_THROW(sums_with(Wrong::nothing, 0), emulation::Fault);
  emulation::set_most_together(before);
  std::string said;
  try {
    sums_with(Wrong::nothing, 0, kBlocks - 1);
  } catch (const emulation::Fault& fault) {
    said = fault.what();
  }
  EXPECT_NE(said.find("wait for ever"), std::string::npos) << said;
}

}  // namespace
}  // namespace espalier::cuda::hopper
