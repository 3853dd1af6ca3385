// Attention composed of calls of a library, with ATen's FlashAttention of processors.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>
#include <set>

#include "espalier/ops/attention/composed.h"
#include "espalier/selftest/operation_check.h"

namespace espalier {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// No call of it is made: merging needs none.
class NoCalls final : public LibraryAttention {
 public:
  const AttentionKernelsRow& row() const override { return row_of(AttentionKernels::flash); }
  at::Tensor seen(const at::Tensor& tensor) const override { return tensor; }
  std::vector<std::int32_t> on_host(const at::Tensor&) const override { return {}; }
  at::Tensor on_device(const std::vector<std::int32_t>&) const override { return {}; }
  Result rectangle(const at::Tensor&, const at::Tensor&, const at::Tensor&, double) const override { return {}; }
  Result squares(const at::Tensor&, const at::Tensor&, const at::Tensor&, const CausalSquares&, double) const override {
    return {};
  }
  Gradients rectangle_backward(const Saved&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                               double) const override {
    return {};
  }
  Gradients squares_backward(const Saved&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                             const CausalSquares&, double) const override {
    return {};
  }
};

TEST(ComposedAttention, GivesTheAnswerOfTheOwnKernelsInFloat64) {
  for (const OperationCase& each : attention_cases()) {
    if (each.sizes.starts_with("1 rows, path 0")) continue;  // a row that sees itself alone: its gradients are rounding
    for (const DType dtype : {DType::float64, DType::float32}) {
      const OperationCheck check = check_operation(flash_cpu_device(), each, dtype);
      EXPECT_TRUE(check.pass()) << check.operation << ", " << check.sizes << ", " << name_of(dtype) << ": off by "
                                << check.error << ", allowed " << check.allowed;
    }
  }
}

// A path of 1 with three children, one of which has two again; every pair that is seen is in one call, once, and no
// square has more rows than it may.
TEST(ComposedAttention, CallsHoldEveryPairOnce) {
  const std::vector<std::int32_t> end{10, 3, 3, 7, 6, 6, 7, 10, 10, 10};
  const auto rows = static_cast<std::int32_t>(end.size());
  std::multiset<std::pair<std::int64_t, std::int64_t>> seen;
  for (std::int32_t i = 0; i < rows; ++i)
    for (std::int32_t j = 0; j <= i; ++j)
      if (i < end[static_cast<std::size_t>(j)]) seen.insert({i, j});
  for (const std::int64_t most : {kAnyRows, std::int64_t{2}, std::int64_t{1}}) {
    const ComposedCalls calls = composed_calls(end, most);
    std::multiset<std::pair<std::int64_t, std::int64_t>> called;
    for (std::size_t s = 0; s + 1 < calls.squares.begin.size(); ++s)
      for (std::int64_t i = calls.squares.begin[s]; i < calls.squares.begin[s + 1]; ++i)
        for (std::int64_t j = calls.squares.begin[s]; j <= i; ++j) called.insert({i, j});
    for (const auto& [first, begin, last] : calls.rectangles)  // CausalRun: rows [begin, last)
      for (std::int64_t i = begin; i < last; ++i)
        for (std::int64_t j = first; j < begin; ++j) called.insert({i, j});
    EXPECT_EQ(called, seen) << most;
    EXPECT_EQ(calls.squares.longest, std::min<std::int64_t>(most, 3));
  }
}

// FlashAttention-2 writes +inf and 0 for a row without keys; whatever else may stand there is nothing, too.
TEST(ComposedAttention, ARowWithoutKeysAddsNothing) {
  const auto rows = [](double value) { return at::full({4, 1, 2}, value, at::kDouble); };
  const auto sums = [](std::vector<double> values) { return at::tensor(values, at::kDouble).view({1, 4}); };
  const at::Tensor first = rows(5);
  first[1].fill_(std::numeric_limits<double>::quiet_NaN());
  const at::Tensor out = rows(0), lse = sums({0, 0, 0, 0});
  NoCalls().merge({first, sums({0.5, kInfinity, -kInfinity, 0.25})},
                  {rows(1), sums({0.5, -200, kInfinity, -kInfinity})}, out, lse);
  const at::Tensor mean = at::tensor({3.0, 3.0, 1.0, 1.0, 0.0, 0.0, 5.0, 5.0}, at::kDouble).view({4, 1, 2});
  EXPECT_LT((out - mean).abs().max().item<double>(), 4 * 0x1p-52) << out;  // a logarithm and an exponential
  EXPECT_NEAR(lse[0][0].item<double>(), 0.5 + std::log(2.0), 1e-15);
  EXPECT_TRUE(lse.narrow(1, 1, 3).equal(sums({0, -200, -kInfinity, 0.25}).narrow(1, 1, 3))) << lse;
}

}  // namespace
}  // namespace espalier
