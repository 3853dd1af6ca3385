// The emulation finds what it is there to find: each kernel here has one fault, and a twin without it.
#include "tests/cuda/emulation.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace espalier::emulation {
namespace {

constexpr unsigned kSeeds[] = {0, 1, 2, 3, 4, 5};

template <class Body>
void launch(unsigned blocks, unsigned threads, Body body, std::size_t shared_bytes = 0) {
  run({{blocks}, {threads}, shared_bytes}, body);
}

template <class Body>
std::string fault_of(unsigned threads, Body body) {
  for (const unsigned seed : kSeeds) {
    set_seed(seed);
    try {
      launch(1, threads, body);
      return "none with seed " + std::to_string(seed);
    } catch (const Fault& fault) {
      if (seed == kSeeds[std::size(kSeeds) - 1]) return fault.what();
    }
  }
  return "";
}

float& shared_number(int i, Site site = Site::current()) {
  return static_cast<float*>(shared_object(64 * sizeof(float), site))[i];
}

// Thread t's partner's number through shared memory.
void exchange_numbers(std::vector<float>& out, bool with_barrier) {
  launch(1, 64, [&out, with_barrier] {
    float* const numbers = static_cast<float*>(shared_object(64 * sizeof(float), Site::current()));
    const unsigned t = threadIdx.x;
    numbers[t] = static_cast<float>(t);
    if (with_barrier) __syncthreads();
    out[t] = numbers[63 - t];
  });
}

TEST(Emulation, EveryThreadOfEveryBlockRunsOnceInEveryOrder) {
  for (const unsigned seed : kSeeds) {
    set_seed(seed);
    std::vector<int> runs(6 * 40);
    run({{3, 2}, {8, 5}}, [&runs] {
      const unsigned block = blockIdx.y * gridDim.x + blockIdx.x;
      ++runs[block * 40 + threadIdx.y * blockDim.x + threadIdx.x];
    });
    EXPECT_EQ(runs, std::vector<int>(6 * 40, 1)) << "seed " << seed;
  }
}

TEST(Emulation, AMissingBarrierShowsAsNaNInSomeOrders) {
  for (const unsigned seed : kSeeds) {
    set_seed(seed);
    std::vector<float> with(64), without(64);
    exchange_numbers(with, true);
    exchange_numbers(without, false);
    int wrong = 0;
    for (unsigned t = 0; t < 64; ++t) {
      EXPECT_EQ(with[t], static_cast<float>(63 - t)) << "seed " << seed;
      wrong += without[t] == static_cast<float>(63 - t) ? 0 : 1;
    }
    EXPECT_GT(wrong, 0) << "seed " << seed;
  }
}

// Each round's number of one warp, read by the other. Without the second barrier a warp that runs ahead overwrites it.
int rounds_misread(bool second_barrier) {
  int wrong = 0;
  launch(1, 64, [&wrong, second_barrier] {
    float& number = *static_cast<float*>(shared_object(sizeof(float), Site::current()));
    for (int round = 0; round < 4; ++round) {
      if (threadIdx.x == 0) number = static_cast<float>(round);
      __syncthreads();
      if (number != static_cast<float>(round)) ++wrong;
      if (second_barrier) __syncthreads();
    }
  });
  return wrong;
}

TEST(Emulation, MemoryUsedAgainTooEarlyShowsWhenAWarpRunsAhead) {
  int found = 0;
  for (const unsigned seed : kSeeds) {
    set_seed(seed);
    EXPECT_EQ(rounds_misread(true), 0) << "seed " << seed;
    found += rounds_misread(false) > 0 && seed % 2 != 0 ? 1 : 0;
  }
  EXPECT_GT(found, 0);
}

TEST(Emulation, ABarrierThatSomeThreadsDoNotReachIsNamed) {
  const std::string fault = fault_of(64, [] {
    if (threadIdx.x < 32) __syncthreads();
  });
  EXPECT_NE(fault.find("a barrier or a warp operation that not all threads reach"), std::string::npos) << fault;
  EXPECT_NE(fault.find("32 threads (first: 0) wait at the barrier of emulation_test.cpp:"), std::string::npos) << fault;
  EXPECT_NE(fault.find("32 threads (first: 32) ended"), std::string::npos) << fault;
}

TEST(Emulation, TwoBarriersAreNotOne) {
  const std::string fault = fault_of(64, [] {
    if (threadIdx.x < 32)
      __syncthreads();
    else
      __syncthreads();
  });
  EXPECT_NE(fault.find("threads wait at different barriers"), std::string::npos) << fault;
}

TEST(Emulation, ShufflesGiveTheLanesValue) {
  for (const unsigned seed : kSeeds) {
    set_seed(seed);
    std::vector<double> sums(64), others(64);
    std::vector<unsigned> votes(64);
    launch(1, 64, [&] {
      double sum = threadIdx.x;
      for (int lanes = 4; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes, 8);
      sums[threadIdx.x] = sum;
      others[threadIdx.x] = __shfl_sync(~0u, static_cast<double>(threadIdx.x), 3, 16);
      votes[threadIdx.x] = __ballot_sync(~0u, threadIdx.x % 3 == 0 ? 1 : 0);
    });
    for (unsigned t = 0; t < 64; ++t) {
      EXPECT_EQ(sums[t], 8 * (t / 8 * 8) + 28) << "seed " << seed;
      EXPECT_EQ(others[t], t / 16 * 16 + 3);
      unsigned vote = 0;
      for (unsigned lane = 0; lane < 32; ++lane) vote |= (t / 32 * 32 + lane) % 3 == 0 ? 1u << lane : 0;
      EXPECT_EQ(votes[t], vote);
    }
  }
}

TEST(Emulation, LanesThatAreMissingOrElsewhereAreNamed) {
  EXPECT_NE(fault_of(32,
                     [] {
                       if (threadIdx.x != 5) __syncwarp();
                     })
                .find("31 threads (first: 0) wait in syncwarp of emulation_test.cpp:"),
            std::string::npos);
  EXPECT_NE(fault_of(32,
                     [] {
                       if (threadIdx.x < 16)
                         __shfl_xor_sync(~0u, 1, 1);
                       else
                         __ballot_sync(~0u, 1);
                     })
                .find("lanes of a warp are in different operations"),
            std::string::npos);
  EXPECT_NE(fault_of(32, [] { __syncwarp(0xffff); }).find("whose mask leaves it out"), std::string::npos);
  EXPECT_NE(fault_of(32,
                     [] {
                       if (threadIdx.x < 16) __shfl_sync(0xffff, 1, 20);
                     })
                .find("a lane outside the mask is read"),
            std::string::npos);
}

TEST(Emulation, SharedMemoryIsNewForEachBlockAndStartsAsNaN) {
  std::vector<float> seen(3);
  set_seed(0);
  launch(3, 32, [&] {
    float& number = shared_number(static_cast<int>(threadIdx.x));
    if (threadIdx.x == 0) seen[blockIdx.x] = number;
    number = 1;
  });
  for (const float number : seen) EXPECT_TRUE(std::isnan(number));
}

// At the page behind it here; `make asan` names the place.
TEST(EmulationDeathTest, AnAccessPastTheEndOfSharedMemoryEndsTheProgram) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  for (const bool reads : {true, false})
    EXPECT_DEATH(launch(1, 32,
                        [reads] {
                          float* const numbers = static_cast<float*>(shared_object(128, Site::current()));
                          volatile float* const at = numbers + threadIdx.x + 1;
                          if (reads)
                            numbers[0] = *at;
                          else
                            *at = 1;
                        }),
                 "");
  launch(1, 32, [] { static_cast<float*>(shared_object(128, Site::current()))[threadIdx.x] = 1; });
}

TEST(Emulation, ACopyInFlightIsNaNUntilItsWait) {
  alignas(16) float from[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<float> early(2), late(2);
  launch(
      1, 1,
      [&] {
        float* const to = static_cast<float*>(dynamic_shared_bytes());
        begin_copy(to, from, 16, 16, Site::current());
        commit_copies();
        begin_copy(to + 4, from + 4, 16, 8, Site::current());
        commit_copies();
        wait_for_copies(1);
        early = {to[0], to[4]};
        wait_for_copies(0);
        late = {to[5], to[6]};
      },
      32);
  EXPECT_EQ(early[0], 1);
  EXPECT_TRUE(std::isnan(early[1]));
  EXPECT_EQ(late, (std::vector<float>{6, 0}));
  EXPECT_NE(fault_of(1,
                     [&] {
                       begin_copy(shared_object(16, Site::current()), from, 16, 16, Site::current());
                       commit_copies();
                     })
                .find("a copy in flight that nobody waited for"),
            std::string::npos);
  EXPECT_NE(fault_of(1,
                     [&] {
                       void* const to = shared_object(16, Site::current());
                       begin_copy(to, from, 16, 16, Site::current());
                       commit_copies();
                       begin_copy(to, from + 4, 16, 16, Site::current());
                     })
                .find("a copy to where another one is in flight"),
            std::string::npos);
}

TEST(Emulation, AccessesAndLaunchesThatAGpuRefusesAreRefused) {
  alignas(16) static float numbers[8];
  EXPECT_NE(fault_of(1, [] { expect_aligned(numbers + 1, 16, Site::current()); }).find("no multiple of that"),
            std::string::npos);
  EXPECT_THROW(run({{1}, {1025}}, [] {}), Fault);
  EXPECT_THROW(run({{1, 65536}, {1}}, [] {}), Fault);
  EXPECT_THROW(run({{1}, {32}, 163 * 1024 + 1}, [] {}), Fault);
  EXPECT_THROW(run({{0}, {32}}, [] {}), Fault);
  const auto with_object = [](std::size_t bytes) {
    run({{1}, {32}, bytes}, [] { shared_object(1024, Site::current()); });
  };
  EXPECT_NO_THROW(with_object(162 * 1024));
  EXPECT_THROW(with_object(162 * 1024 + 4), Fault);
}

TEST(Emulation, RunsOnAfterAFault) {
  set_seed(1);
  EXPECT_THROW(launch(1, 64, [] { fail("stopped", Site::current()); }), Fault);
  int runs = 0;
  launch(1, 64, [&] {
    __syncwarp();
    ++runs;
  });
  EXPECT_EQ(runs, 64);
}

}  // namespace
}  // namespace espalier::emulation
