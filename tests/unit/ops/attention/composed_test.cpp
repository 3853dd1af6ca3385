// Attention composed of calls of a library, with ATen's FlashAttention of processors.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <limits>
#include <numeric>
#include <set>

#include "espalier/ops/attention/composed.h"
#include "espalier/selftest/operation_check.h"

namespace espalier {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// No call of it is made: merging needs none.
class NoCalls : public LibraryAttention {
 public:
  const AttentionKernelsRow& row() const override { return row_of(AttentionKernels::flash); }
  at::Tensor seen(const at::Tensor& tensor) const override { return tensor; }
  std::vector<std::int32_t> on_host(const at::Tensor&) const override { return {}; }
  at::Tensor on_device(const at::Tensor& numbers) const override { return numbers; }
  Result rectangle(const at::Tensor&, const at::Tensor&, const at::Tensor&, double, ListsOnDevice&) const override {
    return {};
  }
  Result squares(const at::Tensor&, const at::Tensor&, const at::Tensor&, const CausalSquares&, double,
                 ListsOnDevice&) const override {
    return {};
  }
  Gradients rectangle_backward(const Saved&, const at::Tensor&, const at::Tensor&, const at::Tensor&, double,
                               ListsOnDevice&) const override {
    return {};
  }
  Gradients squares_backward(const Saved&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                             const CausalSquares&, double, ListsOnDevice&) const override {
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

// A path of 1 with three children, one of which has two again.
const std::vector<std::int32_t> kTree{10, 3, 3, 7, 6, 6, 7, 10, 10, 10};

std::vector<std::int32_t> rows_up_to(std::int32_t end) {
  std::vector<std::int32_t> rows(static_cast<std::size_t>(end));
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

// Every pair that is seen is in one call, once, and no square has more rows than it may; for all rows, and for each
// choice of rows, too, as in a last block.
TEST(ComposedAttention, CallsHoldEveryPairOnce) {
  const auto rows = static_cast<std::int32_t>(kTree.size());
  for (std::uint32_t choice = 1; choice < 1U << rows; ++choice) {
    std::vector<std::int32_t> query_row;
    for (std::int32_t i = 0; i < rows; ++i)
      if ((choice >> i & 1) != 0) query_row.push_back(i);
    std::multiset<std::pair<std::int64_t, std::int64_t>> seen;
    for (std::size_t q = 0; q < query_row.size(); ++q)
      for (std::int32_t j = 0; j <= query_row[q]; ++j)
        if (query_row[q] < kTree[static_cast<std::size_t>(j)]) seen.insert({q, j});
    for (const std::int64_t most : {kAnyRows, std::int64_t{2}, std::int64_t{1}}) {
      const ComposedCalls calls = composed_calls(kTree, query_row, most);
      std::multiset<std::pair<std::int64_t, std::int64_t>> called;
      for (std::size_t s = 0; s + 1 < calls.squares.begin.size(); ++s)
        for (std::int64_t i = calls.squares.begin[s]; i < calls.squares.begin[s + 1]; ++i)
          for (std::int64_t j = calls.squares.begin[s]; j <= i; ++j)
            called.insert({i, query_row[static_cast<std::size_t>(j)]});
      for (const KeyRectangle& each : calls.rectangles)
        for (std::int64_t i = each.query; i < each.query + each.queries; ++i)
          for (std::int64_t j = each.key; j < each.key + each.keys; ++j) called.insert({i, j});
      ASSERT_EQ(called, seen) << choice << ", " << most;
      EXPECT_LE(calls.squares.longest, most);
      EXPECT_EQ(calls.squares.begin.back(), static_cast<std::int32_t>(query_row.size()));
    }
  }
  EXPECT_EQ(composed_calls(kTree, rows_up_to(rows)).squares.longest, 3);
}

// Branches of 100 rows behind one row that all of them see.
std::vector<std::int32_t> branches_of_100(std::int32_t branches) {
  std::vector<std::int32_t> end{1 + 100 * branches};
  for (std::int32_t b = 1; b <= branches; ++b) end.insert(end.end(), 100, 1 + 100 * b);
  return end;
}

TEST(ComposedAttention, ChosenRowsInLongRunsAreTheLibrarys) {
  const std::vector<std::int32_t> end = branches_of_100(4), all = rows_up_to(401);
  const auto without = [&](auto left_out) {
    std::vector<std::int32_t> rows = all;
    std::erase_if(rows, left_out);
    return rows;
  };
  EXPECT_TRUE(worth_calls(end, all));
  EXPECT_TRUE(worth_calls(end, without([](std::int32_t row) { return row > 0 && row % 100 == 0; }))) << "last rows";
  EXPECT_TRUE(worth_calls(end, without([](std::int32_t row) { return row < 101; }))) << "whole branches";
  EXPECT_FALSE(worth_calls(end, without([](std::int32_t row) { return row % 3 == 0; }))) << "runs of two";
  std::vector<std::int32_t> twice = all;
  twice.insert(twice.begin() + 7, 7);
  EXPECT_FALSE(worth_calls(end, twice)) << "a row has two queries";
  // Two runs in a branch: more calls than all rows take, but long ones.
  EXPECT_TRUE(worth_calls(std::vector<std::int32_t>(401, 401), without([](std::int32_t row) { return row == 200; })));
  EXPECT_FALSE(
      worth_calls(std::vector<std::int32_t>(401, 401), without([](std::int32_t row) { return row % 40 == 0; })));
}

TEST(ComposedAttention, ALastBlockGoesToTheLibraryByItsChosenRows) {
  class Known final : public NoCalls {
   public:
    std::vector<std::int32_t> on_host(const at::Tensor& numbers) const override {
      const at::Tensor all = numbers.contiguous();
      return {all.data_ptr<std::int32_t>(), all.data_ptr<std::int32_t>() + all.numel()};
    }
  } library;
  const auto composed = [&](std::vector<std::int32_t> rows, bool in_runs) {
    const auto T = static_cast<std::int64_t>(401), Q = static_cast<std::int64_t>(rows.size());
    const at::Tensor own = at::zeros({T, 8}), path = at::zeros({5, 8});
    AttentionProblem problem{
        8, at::zeros({Q, 8}), own, own, path, path, whole_numbers(rows), whole_numbers(branches_of_100(4))};
    problem.queries_in_runs = in_runs;
    return composes(library, problem, at::kBFloat16);
  };
  std::vector<std::int32_t> chosen = rows_up_to(401);
  std::erase_if(chosen, [](std::int32_t row) { return row > 0 && row % 100 == 0; });
  EXPECT_TRUE(composed(chosen, true));
  EXPECT_FALSE(composed(chosen, false)) << "rows of another rank, or of a decoding step";
  EXPECT_FALSE(composed({400}, true)) << "the last row of a prompt";
  std::erase_if(chosen, [](std::int32_t row) { return row % 2 == 0; });
  EXPECT_FALSE(composed(chosen, true));
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
