// Two threads of a grid that touch one place, one of them writing, with nothing between that orders them, are a race
// whether or not the order in which they ran made a result wrong: launches, barriers and __syncwarp order, nothing else
// does. Kernels with a race; found by the emulation itself (accesses.h), which looks at all kernels of the engine
// whenever they run, and by ThreadSanitizer in `make tsan`, which then looks at them here.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "espalier/ops/cuda/ptx.h"
#include "tests/cuda/accesses.h"
#include "tests/cuda/emulation.h"

namespace {

using Places = std::set<std::string>;

}  // namespace

#if defined(ESPALIER_EMULATION_TSAN)
#include <sanitizer/common_interface_defs.h>

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
#endif

namespace espalier::testing {
namespace {

using emulation::Site;

// The fault that ended the launch, or nothing.
template <class Body>
std::string fault_of(unsigned blocks, unsigned threads, Body body) {
  try {
    emulation::run({{blocks}, {threads}}, body);
  } catch (const emulation::Fault& fault) {
    return fault.what();
  }
  return "";
}

// "file:line" of all accesses that race.
template <class Body>
Places races_of(unsigned blocks, unsigned threads, Body body) {
  const std::string fault = fault_of(blocks, threads, body);
#if defined(ESPALIER_EMULATION_TSAN)
  EXPECT_EQ(fault, "");
  return places_reported();
#else
  Places places;  // behind each " at "
  for (std::size_t at = fault.find(" at "); at != std::string::npos; at = fault.find(" at ", at + 1))
    places.insert(fault.substr(at + 4, fault.find_first_of(" ,", at + 4) - at - 4));
  return places;
#endif
}

// Global memory.
template <class Number>
class Array {
 public:
  explicit Array(std::size_t count) : room_(static_cast<Number*>(std::aligned_alloc(kPage, kPage)), &std::free) {
    std::fill_n(room_.get(), kPage / sizeof(Number), Number(0));
    emulation::add_array(room_.get(), kPage, begin(), count * sizeof(Number));
  }
  ~Array() { emulation::forget_array(room_.get()); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  Number* begin() const { return room_.get() + 16 / sizeof(Number); }
  Number& operator[](std::size_t i) const { return begin()[i]; }

 private:
  static constexpr std::size_t kPage = 4096;
  std::unique_ptr<Number, void (*)(void*)> room_;
};

float* shared_numbers(Site site = Site::current()) {
  return static_cast<float*>(emulation::shared_object(64 * sizeof(float), site));
}

std::string here(int line) { return "kernel_races_test.cpp:" + std::to_string(line); }

class Races : public ::testing::TestWithParam<unsigned> {
 protected:
  void SetUp() override { emulation::set_seed(GetParam()); }
};

TEST_P(Races, WithoutABarrierBetweenWriteAndRead) {
  const Array<float> out(64);
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
  const Array<float> out(64);
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
  const Array<float> out(32);
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
  const Array<float> out(3);
  const int line = __LINE__ + 2;
  for (const bool apart : {true, false}) {
    const Places found = races_of(3, 1, [&] { out[apart ? blockIdx.x : 0] += 1; });
    EXPECT_EQ(found, apart ? Places{} : Places{here(line)});
  }
  EXPECT_EQ(races_of(3, 1, [&] { out[blockIdx.x] = 1; }), Places{});  // a launch comes after the one before it
}

// The emulation ignores its own accesses on a thread, and sees the thread's later ones.
TEST_P(Races, OfALaterBlockOnTheSameThreads) {
  const Array<float> out(4);
  const int line = __LINE__ + 3;
  const Places found = races_of(9, 64, [&] {
    __syncwarp();
    if (blockIdx.x == 8 && threadIdx.x >= 62) out[0] += 1;
  });
  EXPECT_EQ(found, Places{here(line)});
}

TEST_P(Races, OfACopyInFlightThatOnlyItsThreadWaitedFor) {
  alignas(16) static const float from[4] = {1, 2, 3, 4};
  const Array<float> out(32);
  for (const bool barrier : {true, false}) {
    const Places found = races_of(1, 32, [&] {
      float* const numbers = shared_numbers();
      if (threadIdx.x == 3) emulation::begin_copy(numbers, from, 16, 16, Site::current());
      emulation::commit_copies();
      emulation::wait_for_copies(0);
      if (barrier) __syncthreads();
      out[threadIdx.x] = numbers[threadIdx.x % 4];
    });
    EXPECT_EQ(found.empty(), barrier);
  }
}

TEST_P(Races, OfARowOfAMatrixInstructionThatAnotherLaneWrote) {
  for (const bool syncwarp : {true, false}) {
    const Places found = races_of(1, 32, [&] {
      auto* const tile = static_cast<bfloat16*>(emulation::shared_object(32 * 16, Site::current()));
      const unsigned lane = threadIdx.x;
      for (int i = 0; i < 8; ++i) tile[lane * 8 + i] = bfloat16(1.0f);
      if (syncwarp) __syncwarp();
      unsigned fragments[4];
      cuda::ldmatrix_x4<false>(fragments, cuda::place_of(tile + (31 - lane) * 8));
    });
    EXPECT_EQ(found.empty(), syncwarp);
  }
}

// One warp's lanes all read what another writes, and their last reader is not the only one that counts.
TEST_P(Races, WithAReadThatIsNotTheLast) {
  const Array<float> out(64);
  for (const unsigned writer : {0u, 1u, 31u, 32u, 63u}) {
    const Places found = races_of(1, 64, [&] {
      float* const numbers = shared_numbers();
      if (threadIdx.x == writer) numbers[0] = 1;
      __syncthreads();
      if (threadIdx.x < 32) out[threadIdx.x] = numbers[0];
      if (threadIdx.x < 32) __syncwarp();
      if (threadIdx.x == writer) numbers[0] = 2;
      __syncthreads();
      out[threadIdx.x] = numbers[0];
    });
    EXPECT_EQ(found.empty(), writer < 32) << writer;
  }
}

// The other reader is a lane, a warp or a block beside the writer, and reads before it or after it.
TEST_P(Races, WithOneOfSeveralReadersThatWrites) {
  const Array<float> numbers(1), out(64);
  const auto races = [&](unsigned blocks, unsigned threads, auto reads, auto writes) {
    return !races_of(blocks, threads, [&] {
              const unsigned n = blockIdx.x * blockDim.x + threadIdx.x;
              if (reads(n)) out[n] = numbers[0];
              if (writes(n)) numbers[0] = 1;
            }).empty();
  };
  for (const unsigned one : {0u, 32u}) {
    const auto only = [one](unsigned n) { return n == one; };
    EXPECT_FALSE(races(1, 64, only, only));
    EXPECT_FALSE(races(2, 32, only, only));
    EXPECT_TRUE(races(
        1, 64, [one](unsigned n) { return n == one || n == one + 3; }, only));
    EXPECT_TRUE(races(
        1, 64, [](unsigned n) { return n % 32 == 0; }, only));
    EXPECT_TRUE(races(
        2, 32, [](unsigned n) { return n % 32 == 0; }, only));
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, Races, ::testing::Values(0u, 1u, 2u));

#if defined(ESPALIER_EMULATION_TSAN)
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
#else
TEST(Arrays, AreNotTouchedBesideThem) {
  const Array<float> numbers(5), out(32);
  const int line = __LINE__ + 3;
  const auto read_at = [&](std::ptrdiff_t i) {
    return fault_of(1, 32, [&] {
      if (threadIdx.x == 7) out[7] = numbers.begin()[i];
    });
  };
  const auto written_at = [&](std::ptrdiff_t i) {
    return fault_of(1, 32, [&] {
      if (threadIdx.x == 7) numbers.begin()[i] = out[7];
    });
  };
  for (const std::ptrdiff_t inside : {0, 4}) EXPECT_EQ(read_at(inside) + written_at(inside), "");
  EXPECT_EQ(read_at(5),
            "an access 4 bytes past the end of an array of 20 bytes: thread 7 of block 0 reads at " + here(line));
  EXPECT_EQ(written_at(6),
            "an access 8 bytes past the end of an array of 20 bytes: thread 7 of block 0 writes at " + here(line + 5));
  EXPECT_NE(read_at(-1).find("an access 4 bytes before an array of 20 bytes"), std::string::npos);
  EXPECT_NE(written_at(-2).find("an access 8 bytes before an array of 20 bytes"), std::string::npos);
}

TEST(Arrays, AreWrittenAtMultiplesOfATypesSize) {
  for (const int bytes : {0, 1, 2}) {
    const std::string fault = fault_of(1, 32, [bytes] {
      if (threadIdx.x == 7)
        *reinterpret_cast<int*>(static_cast<char*>(emulation::shared_object(12, Site::current())) + bytes) = 1;
    });
    EXPECT_EQ(fault.find("an access of 4 bytes at an address that is no multiple of that") != std::string::npos,
              bytes != 0);
  }
}

TEST(Arrays, EndWithSharedMemory) {
  for (const int past : {0, 1}) {
    const std::string fault = fault_of(
        2, 3, [past] { static_cast<float*>(emulation::shared_object(12, Site::current()))[threadIdx.x + past] = 1; });
    EXPECT_EQ(fault.find("an access 4 bytes past the end of an array of 12 bytes") != std::string::npos, past == 1);
  }
}
#endif

}  // namespace
}  // namespace espalier::testing
