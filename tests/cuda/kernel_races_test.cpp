// Under ThreadSanitizer, `make tsan`: every thread of a grid is one of its threads, which launches, barriers and
// __syncwarp order and nothing else does. So two of them that touch one place, one writing, are a race whether or not
// the order in which they ran made a result wrong. Kernels with a race, and all of the engine's, which have none.
#include <gtest/gtest.h>
#include <sanitizer/common_interface_defs.h>

#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "tests/cuda/emulation.h"
#include "tests/cuda/kernel_checks.h"

extern "C" int __tsan_get_report_mop(void* report, unsigned long n, int* thread, void** address, int* size, int* write,
                                     int* atomic, void** trace, unsigned long trace_size);

namespace {

void* reported[256];  // the program's places of the accesses that were reported
int reports = 0;

std::string place_of(void* pc) {
  char place[256] = "";
  __sanitizer_symbolize_pc(pc, "%s:%l", place, sizeof(place));
  const char* const slash = std::strrchr(place, '/');
  return slash != nullptr ? slash + 1 : place;
}

using Places = std::set<std::string>;

// "file:line" of what was reported since the last call.
Places places_reported() {
  Places places;
  for (int n = 0; n < reports; ++n) places.insert(place_of(reported[n]));
  reports = 0;
  return places;
}

}  // namespace

// A race ends nothing: the tests below say which are there and which must not be.
extern "C" const char* __tsan_default_options() {
  return "exitcode=0 suppress_equal_stacks=0 suppress_equal_addresses=0 report_thread_leaks=0";
}
// Not seen itself: it runs as the thread whose access is reported.
extern "C" __attribute__((no_sanitize_thread)) void __tsan_on_report(void* report) {
  for (unsigned long n = 0; n < 2; ++n) {
    int thread = 0, size = 0, write = 0, atomic = 0;
    void *address = nullptr, *trace[1] = {};
    __tsan_get_report_mop(report, n, &thread, &address, &size, &write, &atomic, trace, 1);
    if (trace[0] != nullptr && reports < 256) reported[reports++] = trace[0];
  }
}

namespace espalier::testing {
namespace {

using emulation::Site;

template <class Body>
Places races_of(unsigned blocks, unsigned threads, Body body) {
  emulation::run({{blocks}, {threads}}, body);
  return places_reported();
}

float* shared_numbers(Site site = Site::current()) {
  return static_cast<float*>(emulation::shared_object(64 * sizeof(float), site));
}

std::string here(int line) { return "kernel_races_test.cpp:" + std::to_string(line); }

class Races : public ::testing::TestWithParam<unsigned> {
 protected:
  void SetUp() override { emulation::set_seed(GetParam()); }
};

TEST_P(Races, WithoutABarrierBetweenWriteAndRead) {
  std::vector<float> out(64);
  for (const bool barrier : {true, false}) {
    const int line = __LINE__ + 4;
    const Places found = races_of(1, 64, [&] {
      float* const numbers = shared_numbers();
      const unsigned t = threadIdx.x;
      numbers[t] = 1;
      if (barrier) __syncthreads();
      out[t] = numbers[63 - t];
    });
    EXPECT_EQ(found, barrier ? Places{} : (Places{here(line), here(line + 2)}));
  }
}

// The first warp writes the next round's number while the second may still read this one's.
TEST_P(Races, WithoutABarrierBeforeMemoryIsUsedAgain) {
  std::vector<float> out(64);
  for (const bool barrier : {true, false}) {
    const int line = __LINE__ + 4;
    const Places found = races_of(1, 64, [&] {
      float* const numbers = shared_numbers();
      for (int round = 0; round < 3; ++round) {
        if (threadIdx.x == 0) numbers[0] = 1;
        __syncthreads();
        out[threadIdx.x] = numbers[0];
        if (barrier) __syncthreads();
      }
    });
    EXPECT_EQ(found, barrier ? Places{} : (Places{here(line), here(line + 2)}));
  }
}

TEST_P(Races, BetweenLanesWithoutSyncwarpWhichAShuffleIsNot) {
  std::vector<float> out(32);
  for (const bool syncwarp : {true, false}) {
    const int line = __LINE__ + 4;
    const Places found = races_of(1, 32, [&] {
      float* const numbers = shared_numbers();
      const unsigned lane = threadIdx.x;
      if (lane == 5) numbers[0] = 1;
      __shfl_xor_sync(~0u, lane, 1);
      if (syncwarp) __syncwarp();
      out[lane] = numbers[0];
    });
    EXPECT_EQ(found, syncwarp ? Places{} : (Places{here(line), here(line + 3)}));
  }
}

TEST_P(Races, BetweenBlocksThatWriteOnePlace) {
  std::vector<float> out(3);
  const int line = __LINE__ + 2;
  for (const bool apart : {true, false}) {
    const Places found = races_of(3, 1, [&] { out[apart ? blockIdx.x : 0] += 1; });
    EXPECT_EQ(found, apart ? Places{} : Places{here(line)});
  }
  EXPECT_EQ(races_of(3, 1, [&] { out[blockIdx.x] = 1; }), Places{});  // a launch comes after the one before it
}

// What the emulation ignores of its own it sees of the same thread again.
TEST_P(Races, OfALaterBlockOnTheSameThreads) {
  std::vector<float> out(4);
  const int line = __LINE__ + 3;
  const Places found = races_of(9, 64, [&] {
    __syncwarp();
    if (blockIdx.x == 8 && threadIdx.x >= 62) out[0] += 1;
  });
  EXPECT_EQ(found, Places{here(line)});
}

TEST_P(Races, OfACopyInFlightThatOnlyItsThreadWaitedFor) {
  alignas(16) static const float from[4] = {1, 2, 3, 4};
  std::vector<float> out(32);
  for (const bool barrier : {true, false}) {
    const Places found = races_of(1, 32, [&] {
      float* const numbers = shared_numbers();
      if (threadIdx.x == 3) emulation::begin_copy(numbers, from, 16, Site::current());
      emulation::commit_copies();
      emulation::wait_for_copies(0);
      if (barrier) __syncthreads();
      out[threadIdx.x] = numbers[threadIdx.x % 4];
    });
    EXPECT_EQ(found.empty(), barrier);
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, Races, ::testing::Values(0u, 1u, 2u));

class KernelsOfTheEngine : public ::testing::TestWithParam<const char*> {};

TEST_P(KernelsOfTheEngine, HaveNone) {
  int checked = 0;
  for (const KernelCheck& check : kernel_checks()) {
    if (check.group != GetParam() || check.kind == KernelCheck::Kind::orders) continue;
    ++checked;
    EXPECT_EQ(check.problem(), "") << check.name;
    EXPECT_EQ(places_reported(), Places{}) << check.name;
  }
  EXPECT_GT(checked, 0);
}

INSTANTIATE_TEST_SUITE_P(All, KernelsOfTheEngine,
                         ::testing::Values("Rows", "Moving", "Products", "Attention", "Head", "Experts", "Optimizer",
                                           "Formula", "Unseen"),
                         [](const auto& group) { return std::string(group.param); });

}  // namespace
}  // namespace espalier::testing
