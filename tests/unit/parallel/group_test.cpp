// Collectives of ranks in one process, against what every rank can work out by itself.
#include "espalier/parallel/group.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/concat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>

#include "espalier/base/error.h"
#include "espalier/metrics/timer.h"
#include "tests/support/in_process.h"

namespace espalier {
namespace {

constexpr Degrees kFour{.dp = 4};
constexpr InProcessOptions kImpatient{.timeout = 0.3};

// The tensor of rank r: (r + 1) * (1, 2, ..., n); small whole numbers, exact in every dtype.
at::Tensor of_rank(int rank, std::int64_t n, at::ScalarType dtype) {
  return (at::arange(1, n + 1) * (rank + 1)).to(dtype);
}

void expect_equal(const at::Tensor& got, const at::Tensor& expected) {
  EXPECT_TRUE(at::equal(got, expected)) << got << "\nexpected\n" << expected;
}

TEST(Group, EveryCollectiveInEveryDtype) {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kLong, at::kInt, at::kByte})
    run_ranks(kFour, [dtype](const Mesh& mesh) {
      Group& group = mesh.dp;
      const int rank = group.rank();
      at::Tensor x = of_rank(rank, 3, dtype);
      group.add_over_ranks(x);
      expect_equal(x, of_rank(9, 3, dtype));  // 1 + 2 + 3 + 4 = 10 times
      x = of_rank(rank, 3, dtype);
      group.max_over_ranks(x);
      expect_equal(x, of_rank(3, 3, dtype));
      x = of_rank(rank, 3, dtype);
      const at::Tensor whole = at::empty({4, 3}, dtype);
      group.gather(x, whole);
      for (int r = 0; r < 4; ++r) expect_equal(whole[r], of_rank(r, 3, dtype));
      const at::Tensor part = at::empty({2}, dtype);
      group.scatter_sum(of_rank(rank, 8, dtype), part);
      expect_equal(part, of_rank(9, 8, dtype).narrow(0, 2 * rank, 2));
      x = of_rank(rank, 3, dtype);
      group.broadcast(x, 2);
      expect_equal(x, of_rank(2, 3, dtype));
      const int next = (rank + 1) % 4, before = (rank + 3) % 4;
      group.send(of_rank(rank, 3, dtype), next);
      group.send(of_rank(rank, 2, dtype), next);
      at::Tensor first = at::empty({3}, dtype), second = at::empty({2}, dtype);
      group.receive(first, before);
      group.receive(second, before);
      expect_equal(first, of_rank(before, 3, dtype));
      expect_equal(second, of_rank(before, 2, dtype));
    });
}

// Rank r sends r + s rows to rank s, numbered so that every one is told from every other; none from 0 to 0.
TEST(Group, AnUnevenExchangeBringsEveryRowToItsPlace) {
  run_ranks(kFour, [](const Mesh& mesh) {
    Group& group = mesh.world;
    const int rank = group.rank();
    const auto rows_to = [&](int r) { return static_cast<std::int64_t>(rank + r); };
    std::vector<std::int64_t> rows;
    std::vector<at::Tensor> sent, expected;
    for (int other = 0; other < 4; ++other) {
      rows.push_back(rows_to(other));
      sent.push_back(at::full({rows.back(), 2}, 10.0 * rank + other, at::kFloat));
      expected.push_back(at::full({rows.back(), 2}, 10.0 * other + rank, at::kFloat));
    }
    const at::Tensor receive = at::empty({4 * rank + 6, 2}, at::kFloat);
    group.exchange(at::concat(sent), rows, receive, rows);
    expect_equal(receive, at::concat(expected));
    EXPECT_EQ(group.bytes(), (4 * rank + 6 - 2 * rank) * 8) << "rows that stay are not counted";
  });
}

TEST(Group, BytesAreWhatARankGives) {
  run_ranks(kFour, [](const Mesh& mesh) {
    Group& group = mesh.world;
    auto given = [&, before = std::int64_t{0}](auto&& call) mutable {
      call();
      return group.bytes() - std::exchange(before, group.bytes());
    };
    const at::Tensor eight = at::zeros({8}, at::kFloat), two = at::zeros({2}, at::kFloat);
    EXPECT_EQ(given([&] { group.add_over_ranks(eight); }), 32);
    EXPECT_EQ(given([&] { group.max_over_ranks(two); }), 8);
    EXPECT_EQ(given([&] { group.gather(two, eight); }), 8);
    EXPECT_EQ(given([&] { group.scatter_sum(eight, two); }), 32);
    EXPECT_EQ(given([&] { group.broadcast(eight, 1); }), group.rank() == 1 ? 32 : 0);
    EXPECT_EQ(given([&] { group.wait_for_all(); }), 0);
  });
}

// Rank 1 begins its sums when rank 0 has long gone on; they are waited for in another order than they were begun in.
TEST(Group, WhatIsStartedGoesOnBesideOtherWork) {
  run_ranks({.dp = 2}, [](const Mesh& mesh) {
    Group& group = mesh.replicas;
    const int rank = group.rank();
    const at::Tensor told = at::zeros({1}, at::kInt);
    if (rank == 1) mesh.dp.receive(told, 0);
    const at::Tensor x = of_rank(rank, 3, at::kDouble), y = of_rank(rank, 4, at::kFloat);
    const at::Tensor part = of_rank(rank, 2, at::kFloat), whole = at::empty({4}, at::kFloat);
    const at::Tensor parts = of_rank(rank, 6, at::kFloat), own = at::empty({3}, at::kFloat);
    Pending first = group.start_add(x), second = group.start_gather(part, whole), third = group.start_add(y);
    EXPECT_EQ(group.bytes(), 24 + 8 + 16) << "counted when started";
    if (rank == 0) mesh.dp.send(told, 1);
    { const Pending dropped = group.start_scatter_sum(parts, own); }
    third.wait();
    first.wait();
    first.wait();  // does nothing
    second = Pending();
    expect_equal(x, of_rank(2, 3, at::kDouble));  // 1 + 2 times
    expect_equal(y, of_rank(2, 4, at::kFloat));
    for (int r = 0; r < 2; ++r) expect_equal(whole.narrow(0, 2 * r, 2), of_rank(r, 2, at::kFloat));
    expect_equal(own, of_rank(2, 6, at::kFloat).narrow(0, 3 * rank, 3));
  });
}

TEST(Group, TheLogSaysWhatWasHiddenBesideOtherWork) {
  run_ranks({.dp = 2}, [](const Mesh& mesh) {
    const auto log = std::make_shared<TrafficLog>();
    mesh.record(log);
    const at::Tensor x = of_rank(0, 3, at::kDouble), y = x.clone();
    Pending sum = mesh.replicas.start_add(x, "gradient of layer 1");
    mesh.dp.add_over_ranks(y);
    sum.wait();
    mesh.record(nullptr);
    mesh.dp.add_over_ranks(y);
    ASSERT_EQ(log->size(), 2u);
    const CollectiveEvent &ahead = *log->front(), &at_once = *log->back();
    EXPECT_EQ(ahead.of, "gradient of layer 1");
    EXPECT_EQ(ahead.call, "sum");
    EXPECT_EQ(ahead.bytes, 24);
    EXPECT_LE(ahead.started, at_once.started);
    EXPECT_LE(at_once.ended, ahead.wanted) << "the sum was asked for when the other one was over";
    EXPECT_EQ(ahead.hidden(), std::min(ahead.wanted, ahead.ended) - ahead.started);
    for (const auto& event : *log) {
      EXPECT_EQ(event->axis, "dp");
      EXPECT_LE(event->started, event->ended);
      EXPECT_LE(event->hidden(), event->seconds());
    }
  });
}

TEST(Group, NobodyWaitsTwiceForOneWhoIsSilent) {
  const auto body = [](const Mesh& mesh) {
    if (mesh.world.rank() == 1) return;
    const at::Tensor x = at::zeros({2}), y = at::zeros({2}), z = at::zeros({2});
    const Pending first = mesh.replicas.start_add(x), second = mesh.replicas.start_add(y);
    mesh.replicas.add_over_ranks(z);
  };
  const double begin = Timer::steady_seconds();
  EXPECT_THROW(run_ranks({.dp = 2}, body, {.timeout = 1}), CommunicationError);
  EXPECT_LT(Timer::steady_seconds() - begin, 2) << "dropped while the error is on its way";
}

TEST(Group, NothingIsMovedOrCountedAlone) {
  Group& alone = mesh_of_one().tp;
  const at::Tensor x = of_rank(0, 4, at::kDouble), whole = at::empty({4}, at::kDouble);
  alone.add_over_ranks(x);
  alone.max_over_ranks(x);
  alone.broadcast(x, 0);
  alone.wait_for_all();
  expect_equal(x, of_rank(0, 4, at::kDouble));
  alone.gather(x, whole);
  expect_equal(whole, x);
  alone.scatter_sum(x.mul(2), whole);
  expect_equal(whole, x.mul(2));
  const std::int64_t rows[] = {4};
  alone.exchange(x, rows, whole, rows);
  expect_equal(whole, x);
  alone.start_add(x).wait();
  alone.start_scatter_sum(x.mul(3), whole).wait();
  expect_equal(whole, x.mul(3));
  alone.start_gather(x, whole).wait();
  expect_equal(whole, x);
  EXPECT_EQ(alone.bytes(), 0);
  EXPECT_TRUE(mesh_of_one().writes());
}

TEST(Group, AnExceptionInOneRankEndsAll) {
  std::atomic<int> told = 0;
  const auto body = [&](const Mesh& mesh) {
    if (mesh.world.rank() == 2) throw InputError({"rollouts.jsonl:17", "an id", "none", ""});
    try {
      mesh.world.wait_for_all();
    } catch (const CommunicationError&) {
      ++told;
      throw;
    }
  };
  EXPECT_THROW(run_ranks(kFour, body), InputError) << "the cause, not what it led to";
  EXPECT_EQ(told, 3);
}

TEST(Group, ARankThatNeverComesIsGivenUp) {
  const auto body = [](const Mesh& mesh) {
    if (mesh.world.rank() != 1) mesh.world.wait_for_all();
  };
  EXPECT_THROW(run_ranks(kFour, body, kImpatient), CommunicationError);
  const auto receiver = [](const Mesh& mesh) {
    if (mesh.world.rank() == 0) mesh.world.receive(at::zeros({1}), 1);
  };
  EXPECT_THROW(run_ranks(kFour, receiver, kImpatient), CommunicationError);
}

TEST(Group, RanksThatCallDifferentThingsAreTold) {
  const auto other_call = [](const Mesh& mesh) {
    const at::Tensor x = at::zeros({2});
    mesh.world.rank() == 0 ? mesh.world.add_over_ranks(x) : mesh.world.max_over_ranks(x);
  };
  EXPECT_THROW(run_ranks(kFour, other_call, kImpatient), CommunicationError);
  const auto other_size = [](const Mesh& mesh) { mesh.world.add_over_ranks(at::zeros({2 + mesh.world.rank()})); };
  EXPECT_THROW(run_ranks(kFour, other_size, kImpatient), CommunicationError);
}

TEST(Mesh, EveryAxisIsItsOwnGroup) {
  run_ranks({.tp = 2, .cp = 2, .dp = 2}, [](const Mesh& mesh) {
    const auto sum = [](Group& group, double value) { return sums_over_ranks(group, {value})[0]; };
    const int rank = mesh.world.rank();
    EXPECT_EQ(sum(mesh.tp, rank), 2 * (rank & ~1) + 1);
    EXPECT_EQ(sum(mesh.cp, rank), 2 * (rank & ~2) + 2);
    EXPECT_EQ(sum(mesh.dp, rank), 2 * (rank & ~4) + 4);
    EXPECT_EQ(sum(mesh.pp, rank), rank);
    EXPECT_EQ(sum(mesh.replicas, 1), 4);
    EXPECT_EQ(sum(mesh.world, rank), 28);
    EXPECT_EQ(mesh.writes(), rank == 0);
  });
}

TEST(Group, NumbersAndTextsOfTheHost) {
  run_ranks(kFour, [](const Mesh& mesh) {
    const double rank = mesh.world.rank();
    EXPECT_EQ(sums_over_ranks(mesh.world, {rank, 1}), (std::vector<double>{6, 4}));
    EXPECT_EQ(maxima_over_ranks(mesh.world, {rank, -rank}), (std::vector<double>{3, 0}));
    EXPECT_EQ(text_of_rank(mesh.world, std::string(static_cast<std::size_t>(rank) + 2, 'x'), 1), "xxx");
    EXPECT_EQ(text_of_rank(mesh.world, ""), "");
    EXPECT_EQ(numbers_of_ranks(mesh.world, ~std::uint64_t{0} - mesh.world.rank()),
              (std::vector<std::uint64_t>{~0ull, ~0ull - 1, ~0ull - 2, ~0ull - 3}));
  });
}

}  // namespace
}  // namespace espalier
