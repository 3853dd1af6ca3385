// Memory that calls use in turns: what one holds open makes way for another, and comes back.
#include "espalier/hosting/call_memory.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>

namespace espalier {
namespace {

constexpr std::int64_t kMiB = 1 << 20;

at::Tensor numbers(Arena& arena, std::int64_t bytes, float first) {
  const at::Tensor out = arena.take({bytes / 4}, at::kFloat);
  out.copy_(at::arange(bytes / 4, at::kFloat) + first);
  return out;
}

bool has_numbers(const at::Tensor& tensor, float first) {
  return at::equal(tensor, at::arange(tensor.numel(), at::kFloat) + first);
}

// A call of which `between` runs in every pause.
struct Caller {
  Caller(CallMemory& memory, std::function<void()> in_pause) : between(std::move(in_pause)), turns(memory, between) {}

  CallMemory::Pause between;
  CallMemory::Turns turns;
};

void do_nothing() {}

// Runs `others` in the second pause of a call of several items that needs all of the memory and holds three quarters.
// Returns the number of pauses in which others had their turn: where memory was moved for it, it keeps its own.
std::int64_t run_beside_large_call(CallMemory& memory, const std::function<void(Arena& of_large)>& others) {
  std::int64_t pauses = 0;
  std::optional<Caller> large;
  large.emplace(memory, [&] {
    if (++pauses == 2) others(large->turns.workspace().arena);
  });
  large->turns.begin(8 * kMiB, false);
  Arena& arena = large->turns.workspace().arena;
  {
    const ArenaScope scope(arena);
    const at::Tensor whole = numbers(arena, 5 * kMiB, 1), rest = numbers(arena, kMiB - 4096, 7);
    large->turns.pause();
    EXPECT_TRUE(has_numbers(whole, 1) && has_numbers(rest, 7));
    EXPECT_GE(arena.held(), 6 * kMiB - 4096);
  }
  return pauses;
}

TEST(CallMemory, AnotherCallHasItsTurnBesideOneThatHoldsMostOfTheMemory) {
  CallMemory memory(8 * kMiB, "");
  run_beside_large_call(memory, [&](Arena& of_large) {
    Caller small(memory, do_nothing);
    small.turns.begin(3 * kMiB, true);
    EXPECT_EQ(of_large.held(), 0);
    EXPECT_EQ(of_large.touched(), 0);
    EXPECT_TRUE(has_numbers(numbers(small.turns.workspace().arena, 3 * kMiB, 3), 3));
  });
  EXPECT_EQ(memory.moves(), 1);
}

TEST(CallMemory, TwoLargeCallsRunInTurns) {
  CallMemory memory(8 * kMiB, "");
  const auto second = [&](Arena&) { run_beside_large_call(memory, [](Arena&) {}); };
  EXPECT_EQ(run_beside_large_call(memory, second), 2);
  EXPECT_EQ(memory.moves(), 1);
}

TEST(CallMemory, WhatFitsBesideMovesNothing) {
  CallMemory memory(8 * kMiB, "");
  run_beside_large_call(memory, [&](Arena& of_large) {
    Caller small(memory, do_nothing);
    small.turns.begin(kMiB, true);
    EXPECT_GT(of_large.held(), 5 * kMiB);
  });
  EXPECT_EQ(memory.moves(), 0);
}

TEST(CallMemory, TokensAreDecodedBesideALargeCall) {
  CallMemory memory(8 * kMiB, "");
  EXPECT_EQ(memory.begin_decoding(), 0.0);
  run_beside_large_call(memory, [&](Arena& of_large) {
    const std::optional<double> seconds = memory.begin_decoding();
    ASSERT_TRUE(seconds);
    EXPECT_GT(*seconds, 0);  // of moving: several tokens follow each other
    EXPECT_EQ(of_large.held(), 0);
    const ArenaScope scope(memory.decoding().arena);
    EXPECT_TRUE(has_numbers(numbers(memory.decoding().arena, 4 * kMiB, 5), 5));
  });
}

struct Ended {};

TEST(CallMemory, AnEndInAPauseLeavesTheArenaInOrder) {
  CallMemory memory(8 * kMiB, "");
  const auto end = [&](Arena&) {
    memory.begin_decoding();
    throw Ended{};
  };
  EXPECT_THROW(run_beside_large_call(memory, end), Ended);
  run_beside_large_call(memory, [](Arena&) {});
}

TEST(CallMemory, WithoutAPlaceForTheContentOthersWait) {
  CallMemory memory(8 * kMiB, "/a folder that is not there");
  run_beside_large_call(memory, [&](Arena& of_large) {
    EXPECT_FALSE(memory.begin_decoding());
    Caller small(memory, [] { throw Ended{}; });
    EXPECT_THROW(small.turns.begin(3 * kMiB, true), Ended);  // it would have waited
    EXPECT_GT(of_large.held(), 5 * kMiB);
  });
  EXPECT_EQ(memory.moves(), 0);
}

}  // namespace
}  // namespace espalier
