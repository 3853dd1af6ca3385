// Declared buffers: what they add up to, and that the arena holds exactly them, stage by stage.
#include "espalier/device/buffers.h"

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include "espalier/base/error.h"
#include "espalier/device/held_buffers.h"
#include "espalier/objective/head_buffers.h"

namespace espalier {
namespace {

enum class Stage { begin, middle, end };

struct ThreeStages : BufferList {
  explicit ThreeStages(DType dtype) : BufferList(element_bytes(dtype)) {
    throughout = add("throughout", 3, 5, Element::activation, Stage::begin, Stage::end);
    early = add("early", 100, 7, Element::accumulator, Stage::begin, Stage::middle);
    in_the_middle = add("in the middle", 10, Buffer::kVector, Element::int32, Stage::middle);
    late = add("late", 50, 2, Element::activation, Stage::end);
    nest(Stage::middle, 1000);
    nest(Stage::middle, 400);
  }
  BufferList::Place throughout, early, in_the_middle, late, absent;
};

TEST(Buffers, AddUpStageByStage) {
  const ThreeStages single(DType::bfloat16), twice(DType::float64);
  // 3 x 5 of 2 bytes and 100 x 7 of 4 in whole lines of 64 bytes, then 10 indices; later 50 x 2 of 2 bytes.
  EXPECT_EQ(single.held(0), 64 + 2816);
  EXPECT_EQ(single.held(1), 64 + 2816 + 64);
  EXPECT_EQ(single.held(2), 64 + 256);
  EXPECT_EQ(single.peak(), single.held(1) + 1000);
  EXPECT_EQ(twice.held(0), 128 + 5632);
  EXPECT_EQ(twice.held(2), 128 + 832);
}

TEST(Buffers, OnesThatAStackCannotHoldAreRefused) {
  Arena arena(1 << 20);
  for (const auto& [first, last] : {std::pair(Stage::middle, Stage::end),     // outlives what lies below it
                                    std::pair(Stage::begin, Stage::middle)})  // begins below what was declared before
  {
    ThreeStages list(DType::float32);
    list.expect_stack();
    list.add("wrong", 1, 1, Element::accumulator, first, last);
    EXPECT_THROW(HeldBuffers(arena, list, at::kFloat), InternalError);
  }
}

TEST(Buffers, TheArenaHoldsWhatWasDeclared) {
  const ThreeStages declared(DType::bfloat16);
  Arena arena(1 << 20);
  const at::Tensor below = arena.take({3}, at::kFloat);
  const std::int64_t mark = arena.in_use();
  {
    HeldBuffers held(arena, declared, at::kBFloat16);
    EXPECT_EQ(arena.in_use(), mark);
    for (const Stage stage : {Stage::begin, Stage::middle, Stage::end}) {
      held.enter(stage);
      EXPECT_EQ(arena.in_use(), mark + declared.held(static_cast<int>(stage)));
      EXPECT_EQ(held[declared.throughout].sizes(), at::IntArrayRef({3, 5}));
      EXPECT_FALSE(held[declared.absent].defined());
      if (stage == Stage::begin) {
        EXPECT_EQ(held[declared.early].scalar_type(), at::kFloat);
      }
      if (stage == Stage::middle) {
        EXPECT_EQ(held[declared.in_the_middle].sizes(), at::IntArrayRef({10}));
      }
      if (stage == Stage::end) {
        EXPECT_THROW(held[declared.early], InternalError);
      }
      if (stage != Stage::end) {
        EXPECT_THROW(held[declared.late], InternalError);
      }
    }
  }
  EXPECT_EQ(arena.in_use(), mark);
  HeldBuffers held(arena, declared, at::kBFloat16);
  held.enter(Stage::end);  // what a stage left out would have taken and given back is not taken
  EXPECT_EQ(arena.in_use(), mark + declared.held(2));
}

TEST(Buffers, NoRowsOrNoColumnsAreNoBytes) {
  BufferList list(element_bytes(DType::float32));
  list.add("no columns", 7, 0);
  list.add("no rows", 0, 7);
  list.add("no numbers", 0, Buffer::kVector);
  EXPECT_EQ(list.peak(), 0);
}

TEST(Buffers, AHeadTakesNoMoreThanItsBlock) {
  const HeadBuffers plain(element_bytes(DType::float32), 1000, 8192, 512, true);
  EXPECT_EQ(plain.block_rows, 256);
  EXPECT_EQ(plain.peak(), 256 * 8192 * 4);
  EXPECT_FALSE(plain.widens());
  const HeadBuffers widened(element_bytes(DType::bfloat16), 100, 150000, 512, false);
  EXPECT_EQ(widened.block_rows, 100);
  EXPECT_EQ(widened.vocabulary_run, 8192);  // 16 MiB of float32 rows
  EXPECT_EQ(widened.peak(), 100 * 150000 * 4 + (16 << 20) + 100 * 512 * 4);
}

TEST(Buffers, AHeadWhoseProductsWriteSumsNarrowsOnlyTheGradient) {
  const auto head = [](DType dtype, bool with_gradients) {
    return HeadBuffers(element_bytes(dtype), 9000, 8192, 512, with_gradients, {.writes_sums = true});
  };
  const std::int64_t block = 4096 * 8192 * 4;
  EXPECT_EQ(head(DType::bfloat16, true).block_rows, 4096);
  EXPECT_EQ(head(DType::bfloat16, true).peak(), block + block / 2 + 4096 * 512 * 4);
  EXPECT_EQ(head(DType::bfloat16, false).peak(), block);
  EXPECT_EQ(head(DType::float32, true).peak(), block);
  EXPECT_EQ(HeadBuffers(element_bytes(DType::bfloat16), 9000, 150000, 512, true, {.writes_sums = true}).block_rows,
            (std::int64_t{512} << 20) / (150000 * 4));
}

TEST(Buffers, AHeadThatIsABlockAheadTakesTwoOfThem) {
  const auto peak = [](DType dtype, std::int64_t outputs, bool with_gradients, bool ahead) {
    return HeadBuffers(element_bytes(dtype), outputs, 8192, 512, with_gradients, {.ahead = ahead}).peak();
  };
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    const std::int64_t block = 256 * 8192 * 4, hidden = dtype == DType::bfloat16 ? 256 * 512 * 4 : 0;
    EXPECT_EQ(peak(dtype, 257, true, true), peak(dtype, 257, true, false) + block + hidden);
    EXPECT_EQ(peak(dtype, 256, true, true), peak(dtype, 256, true, false));    // there is no next one
    EXPECT_EQ(peak(dtype, 257, false, true), peak(dtype, 257, false, false));  // nobody waits
  }
}

}  // namespace
}  // namespace espalier
