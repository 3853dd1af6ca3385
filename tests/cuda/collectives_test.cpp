// Collectives of GPUs as work of streams (espalier/ops/cuda/device_group.h): ranks are threads, each with streams of
// its own that run late and out of step.
#include "espalier/ops/cuda/collectives.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/concat.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "espalier/base/error.h"
#include "espalier/ops/operations.h"
#include "tests/cuda/emulated_runtime.h"
#include "tests/cuda/emulated_streams.h"
#include "tests/support/in_process.h"

namespace espalier::testing {
namespace {

const bool kBound = (bind_device(streamed_device()), true);
constexpr Degrees kThree{.dp = 3};
constexpr unsigned kSeeds = 6;

at::Tensor numbers(int rank, std::int64_t count) { return (at::arange(1, count + 1) * (rank + 1)).to(at::kDouble); }

// Numbers that are there once the compute stream has got so far.
at::Tensor computed(const at::Tensor& values) {
  Device& device = bound_device();
  const at::Tensor there = device.allocate(values.sizes(), values.scalar_type());
  device.operations().convert(device.adopt(values), there);
  return there;
}
at::Tensor room(at::IntArrayRef sizes) { return computed(at::full(sizes, -1.0, at::kDouble)); }

void expect_equal(const at::Tensor& there, const at::Tensor& expected) {
  const at::Tensor got = bound_device().to_host(there);
  EXPECT_TRUE(got.equal(expected)) << got << "\nexpected\n" << expected;
}

class DeviceGroup : public ::testing::TestWithParam<unsigned> {
 protected:
  void SetUp() override { set_stream_seed(GetParam()); }
};

TEST_P(DeviceGroup, SumsMaximaPartsAndCopiesAreThoseOfTheHost) {
  run_ranks(kThree, [](const Mesh& mesh) {
    Group& group = mesh.world;
    const int rank = group.rank();
    const at::Tensor x = computed(numbers(rank, 6)), y = room({6}), whole = room({18}), part = room({2});
    group.add_over_ranks(x);
    bound_device().operations().convert(x, y);  // behind the sum, and before the next collective
    group.gather(y, whole);
    group.scatter_sum(y, part);
    group.max_over_ranks(y);
    expect_equal(whole, numbers(5, 6).repeat({3}));  // 1 + 2 + 3 = 6 times
    expect_equal(part, numbers(17, 6).narrow(0, 2 * rank, 2));
    expect_equal(y, numbers(5, 6));
    {
      const at::Tensor late = computed(numbers(rank, 3)), parts = room({9}), copy = room({3});
      Pending gathered = group.start_gather(late, parts);
      bound_device().operations().convert(late, copy);  // beside it
      Pending summed = group.start_add(copy);
      summed.wait(), gathered.wait();
      expect_equal(copy, numbers(5, 3));
      expect_equal(parts, at::concat({numbers(0, 3), numbers(1, 3), numbers(2, 3)}));
    }
    const at::Tensor of_one = computed(numbers(rank, 4));
    group.broadcast(of_one, 1);
    EXPECT_EQ(sums_over_ranks(group, {1.0 * rank}).front(), 3);  // of the host, beside what is still under way
    expect_equal(of_one, numbers(1, 4));
    EXPECT_EQ(group.bytes(), (6 + 6 + 6 + 6 + 3 + 3 + (rank == 1 ? 4 : 0) + 1) * 8);
  });
}

// Rank r sends r rows to the next one and none to the others: some send nothing at all, and still come.
TEST_P(DeviceGroup, AnExchangeOfNoRowsIsOneToo) {
  run_ranks(kThree, [](const Mesh& mesh) {
    Group& group = mesh.world;
    const auto rank = static_cast<std::size_t>(group.rank()), next = (rank + 1) % 3, before = (rank + 2) % 3;
    std::vector<std::int64_t> given(3), taken(3);
    given[next] = static_cast<std::int64_t>(rank), taken[before] = static_cast<std::int64_t>(before);
    const at::Tensor sent = computed(at::full({given[next], 2}, 1.0 * static_cast<double>(rank), at::kDouble));
    const at::Tensor received = room({taken[before], 2});
    group.exchange(sent, given, received, taken);
    expect_equal(received, at::full({taken[before], 2}, 1.0 * static_cast<double>(before), at::kDouble));
    group.wait_for_all();  // as a program ends: what nobody here reads may be wanted elsewhere
  });
}

// Around a ring in both directions at once, more than may be under way, each overwritten as soon as it was sent.
TEST_P(DeviceGroup, WhatIsSentMayBeWrittenOver) {
  run_ranks(kThree, [](const Mesh& mesh) {
    Group& group = mesh.world;
    const int rank = group.rank(), next = (rank + 1) % 3, before = (rank + 2) % 3;
    constexpr int kMany = 20;
    const at::Tensor x = room({5}), y = room({5});
    for (int i = 0; i < kMany; ++i) {
      bound_device().operations().convert(bound_device().adopt(numbers(rank + i, 5)), x);
      group.send(x, next);
      group.send(x, before);
      bound_device().operations().zero(x);
    }
    for (int i = 0; i < kMany; ++i)
      for (const int from : {before, next}) {
        group.receive(y, from);
        expect_equal(y, numbers(from + i, 5));
      }
  });
}

INSTANTIATE_TEST_SUITE_P(Orders, DeviceGroup, ::testing::Range(0u, kSeeds));

TEST(DeviceGroups, ARankThatNeverComesIsGivenUp) {
  const auto body = [](const Mesh& mesh) {
    if (mesh.world.rank() == 0) return;
    const at::Tensor x = computed(numbers(0, 3));
    mesh.world.add_over_ranks(x);
    (void)bound_device().to_host(x);
  };
  EXPECT_THROW(run_ranks(kThree, body, {.timeout = 0.3}), CommunicationError);
}

// Two ranks that give two meetings to streams of their own, in opposite orders. Returns how many of both ranks'
// meetings take place. A GPU with a single queue of its own starts no stream's work before that of the other one has
// ended. The first rank that waits longer than `patience` ends all meetings that have not taken place.
int meetings(int connections, std::chrono::milliseconds patience) {
  std::mutex lock;
  std::condition_variable changed;
  std::array<int, 2> present{};
  bool given_up = false;
  int met = 0;
  const auto rank = [&](std::array<std::size_t, 2> order) {
    EmulatedStreams own(0);
    own.set_connections(connections);
    std::array<cuda::Event, 2> end{};
    for (std::size_t i = 0; i < 2; ++i) {
      const cuda::Queue queue = own.make_queue();
      const auto meet = [&, which = order[i]] {
        std::unique_lock held(lock);
        ++present[which];
        given_up = !changed.wait_for(held, patience, [&] { return given_up || present[which] == 2; }) || given_up;
        if (!given_up) ++met;
        changed.notify_all();
      };
      own.give(queue, Remote{[] {}, meet, [] {}});
      end[i] = own.record(queue);
    }
    for (const cuda::Event event : end) own.run_until(event);
  };
  std::thread other([&] { rank({1, 0}); });
  rank({0, 1});
  other.join();
  return met;
}

TEST(Connections, StreamsThatShareOneMakeRanksWaitForEachOther) {
  using std::chrono::milliseconds;
  EXPECT_EQ(meetings(32, milliseconds(20'000)), 4);
  EXPECT_EQ(meetings(1, milliseconds(100)), 0);
}

TEST(Connections, GroupsWithMoreQueuesAreRefused) {
  const auto body = [](const Mesh&) {};
  set_stream_connections(3);
  try {
    run_ranks({.dp = 2}, body);
    FAIL() << "it was taken";
  } catch (const DeviceError& error) {
    EXPECT_EQ(error.text().where, "CUDA_DEVICE_MAX_CONNECTIONS");
    EXPECT_EQ(error.text().got, "3");
  }
  set_stream_connections(32);
  EXPECT_NO_THROW(run_ranks({.dp = 2}, body));
}

Remote sleep_of(double seconds) {
  return {[] {}, [seconds] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }, [] {}};
}

TEST(Unfinished, ACollectiveThatDoesNotEndIsGivenUp) {
  const cuda::Queue queue = cuda::make_queue();
  const cuda::Event begin = cuda::record(queue);
  streams().give(queue, sleep_of(0.5));
  const cuda::Event end = cuda::record(queue);
  cuda::unfinished().add(cuda::Collective::Kind::sum, begin, end, 0.05);
  try {
    cuda::wait_until(end);
    FAIL() << "it was waited for";
  } catch (const CommunicationError& error) {
    EXPECT_EQ(error.text().where, "sum over ranks");
  }
  EXPECT_TRUE(cuda::unfinished().empty());
  streams().run_until(end);
}

// It is the compute stream that takes long: the collective behind it has not begun.
TEST(Unfinished, TimeBeforeItsBeginIsNotItsOwn) {
  const cuda::Queue queue = cuda::make_queue();
  streams().give(cuda::Queue::compute, sleep_of(0.2));
  const cuda::Event computed = cuda::record(cuda::Queue::compute);
  cuda::wait(queue, computed);
  const cuda::Event begin = cuda::record(queue), end = cuda::record(queue);
  cuda::unfinished().add(cuda::Collective::Kind::sum, begin, end, 0.05);
  cuda::wait_until(computed);
  cuda::wait_until(end);
  cuda::unfinished().check();
  EXPECT_TRUE(cuda::unfinished().empty());
}

}  // namespace
}  // namespace espalier::testing
