// Rows by expert: every slot once, and the kernels on an expert's rows against plain loops.
#include "espalier/ops/cpu/expert_kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

#include "espalier/base/random.h"
#include "espalier/ops/cpu/router_kernels.h"

namespace espalier::moe {
namespace {

TEST(ExpertRows, HoldEverySlotOnceByExpertAndRow) {
  Random random(4);
  const RouterShape shape{57, 6, 3, true};
  std::vector<double> logits(static_cast<std::size_t>(shape.rows * shape.experts));
  for (double& value : logits) value = random.normal();
  for (std::int64_t r = 0; r < shape.rows; ++r)
    logits[static_cast<std::size_t>(r * shape.experts + 4)] = -100;  // nobody's
  std::vector<std::int32_t> choice(static_cast<std::size_t>(shape.rows * shape.chosen));
  std::vector<double> weight(choice.size());
  choose_experts<double>(shape, logits.data(), nullptr, choice.data(), weight.data());
  struct {
    std::vector<std::int32_t> begin, row, slot;
  } experts{std::vector<std::int32_t>(7), choice, choice};
  sort_by_expert(shape, choice.data(), experts.begin.data(), experts.row.data(), experts.slot.data());
  EXPECT_EQ(experts.begin[4], experts.begin[5]);
  EXPECT_EQ(experts.begin.back(), static_cast<std::int32_t>(choice.size()));
  std::set<std::int32_t> slots;
  for (std::size_t e = 0; e < 6; ++e)
    for (auto i = static_cast<std::size_t>(experts.begin[e]); i < static_cast<std::size_t>(experts.begin[e + 1]); ++i) {
      EXPECT_EQ(choice[static_cast<std::size_t>(experts.slot[i])], static_cast<std::int32_t>(e));
      EXPECT_EQ(experts.row[i], experts.slot[i] / 3);
      if (i > static_cast<std::size_t>(experts.begin[e])) {
        EXPECT_LT(experts.row[i - 1], experts.row[i]);
      }
      slots.insert(experts.slot[i]);
    }
  EXPECT_EQ(slots.size(), choice.size());
}

TEST(ExpertRows, AddWeightedRowsWhereTheyBelong) {
  const std::vector<std::int32_t> row{0, 2}, slot{1, 4};
  const std::vector<float> y{1, 2, 3, 4}, weight{9, 2, 9, 9, 10, 9};
  std::vector<float> into{1, 1, 1, 1, 1, 1};
  add_expert_rows<float>({2, row.data(), slot.data()}, 2, y.data(), weight.data(), into.data());
  EXPECT_EQ(into, (std::vector<float>{3, 5, 1, 1, 31, 41}));
  add_expert_rows<float>({2, row.data(), slot.data()}, 2, y.data(), nullptr, into.data());
  EXPECT_EQ(into, (std::vector<float>{4, 7, 1, 1, 34, 45}));
}

// L = w c . (act Wd^T + b): dL/dw and the weighted gradients from the unweighted ones.
TEST(ExpertRows, WeighTheGradientOfOneExpert) {
  const std::vector<std::int32_t> row{0}, slot{2};
  const std::vector<double> act{0.7, -1.3}, bias{0.5, -0.25, 2}, weight{9, 9, 0.4};
  for (const bool biased : {false, true}) {
    std::vector<double> grad_y{1, -2, 3}, grad_act{0.3, 0.8}, grad_weight{7, 7, 7};
    weigh_expert_gradient<double>({1, row.data(), slot.data()}, 3, 2, act.data(), biased ? bias.data() : nullptr,
                                  weight.data(), grad_y.data(), grad_act.data(), grad_weight.data());
    EXPECT_NEAR(grad_weight[2], 0.7 * 0.3 - 1.3 * 0.8 + (biased ? 0.5 + 0.5 + 6 : 0), 1e-15);
    EXPECT_EQ(grad_weight[0], 7);
    EXPECT_EQ(grad_y, (std::vector<double>{0.4 * 1, 0.4 * -2, 0.4 * 3}));
    EXPECT_EQ(grad_act, (std::vector<double>{0.4 * 0.3, 0.4 * 0.8}));
  }
}

TEST(ExpertRows, SumsAreRoundedOnce) {
  const std::vector<bfloat16> base{bfloat16(1.0f)};
  const std::vector<float> sum{0.00390625f * 3};  // 1 + 3 * 2^-8: a bfloat16 next to 1 has steps of 2^-7
  std::vector<bfloat16> out(1);
  round_sum<bfloat16>(1, base.data(), sum.data(), out.data());
  EXPECT_EQ(static_cast<float>(out[0]), 1.015625f);
  round_sum<bfloat16>(1, nullptr, sum.data(), out.data());
  EXPECT_EQ(static_cast<float>(out[0]), 0.01171875f);
}

}  // namespace
}  // namespace espalier::moe
