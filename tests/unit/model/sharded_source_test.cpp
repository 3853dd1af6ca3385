// A set of rows over several ranks of cp: attention and gradients equal the results of one rank with all rows.
#include "espalier/model/sharded_source.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randn_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <mutex>

#include "espalier/base/error.h"
#include "espalier/mixers/attention/shape.h"
#include "espalier/model/path_source.h"
#include "espalier/ops/cpu/operations.h"
#include "tests/support/in_process.h"

namespace espalier {
namespace {

using at::Tensor;

constexpr std::int64_t kHeads = 4, kKeyHeads = 2, kDim = 4, kPath = 3;
// float64 sums of at most 20 terms of size 1; partial sums of ranks are added in another order.
constexpr double kExact = 1e-12;

ModelShape shape_of_rows() {
  ModelShape shape;
  shape.hidden = 8;
  shape.layer = attention_layers(2, {.heads = kHeads, .kv_heads = kKeyHeads, .head_dim = kDim}, 0);
  return shape;
}

// The inputs and results of a set of rows, all rows of it.
struct SetNumbers {
  explicit SetNumbers(std::int64_t rows)
      : q(at::randn({rows, kHeads * kDim}, at::kDouble)),
        k(at::randn({rows, kKeyHeads * kDim}, at::kDouble)),
        v(at::randn({rows, kKeyHeads * kDim}, at::kDouble)),
        grad_out(at::randn({rows, kHeads * kDim}, at::kDouble)) {}
  Tensor q, k, v, grad_out;
};
struct SetResults {
  explicit SetResults(const SetNumbers& x)
      : out(at::zeros_like(x.q)),
        grad_q(at::zeros_like(x.q)),
        grad_k(at::zeros_like(x.k)),
        grad_v(at::zeros_like(x.v)) {}
  Tensor out, grad_q, grad_k, grad_v;
  Tensor path_k = {}, path_v = {};  // gradients of the path, or a trunk's keys and values
};

LayerAttention attention_of(const Tensor& q, const KeysValues& own, std::int64_t window) {
  LayerAttention out{cpu::operations(), nullptr, 1, kDim, {}, q, own};
  out.window = window;
  return out;
}

void fill_trunk(OpenPath& path, const Tensor& k, const Tensor& v, std::int64_t contributions) {
  path.push(k.size(0), contributions);
  path.top(1).k.copy_(k.view_as(path.top(1).k));
  path.top(1).v.copy_(v.view_as(path.top(1).v));
}

class Sharded : public ::testing::TestWithParam<std::tuple<int, std::int64_t>> {  // ranks, rows
 protected:
  Sharded() : rows_(std::get<1>(GetParam())), x_(rows_) {
    at::manual_seed(5);
    x_ = SetNumbers(rows_);
    above_k_ = at::randn({kPath, kKeyHeads * kDim}, at::kDouble), above_v_ = at::randn_like(above_k_);
    // Two branches below the first row.
    for (std::int64_t i = 0; i < rows_; ++i) {
      const bool first = i > 0 && i <= rows_ / 2;
      ends_.push_back(static_cast<std::int32_t>(first ? rows_ / 2 + 1 : rows_));
      depths_.push_back(static_cast<std::int32_t>(kPath + (first || i == 0 ? i : i - rows_ / 2)));
    }
  }
  Tensor ends() const { return at::tensor(ends_, at::kInt); }
  Tensor depths() const { return at::tensor(depths_, at::kInt); }

  SetResults of_one_rank(std::int64_t window) const {
    Arena arena(std::int64_t{1} << 20, cpu_device());
    OpenPath path(shape_of_rows(), kPath, at::kDouble, true, arena);
    fill_trunk(path, above_k_, above_v_, 1);
    PathSource source(path, kPath, false, ends(), depths());
    SetResults out(x_);
    const Tensor lse = at::empty({kHeads, rows_}, at::kDouble);
    const LayerAttention attention = attention_of(x_.q, {x_.k, x_.v}, window);
    source.attend(attention, out.out, lse);
    source.add_backward(attention, out.out, lse, x_.grad_out, out.grad_q, {out.grad_k, out.grad_v});
    out.path_k = path.path(1, kPath).grad_k.clone(), out.path_v = path.path(1, kPath).grad_v.clone();
    return out;
  }

  // The rows of a rank, and the tensors that say so.
  ShardedRows placed(const RowShares& shares, std::int64_t rank) const {
    const auto rows_of = [&](std::int64_t of) {
      std::vector<std::int32_t> out;
      for (const RowShares::Piece& piece : shares.pieces(of))
        for (std::int64_t row = piece.begin; row < piece.end; ++row) out.push_back(static_cast<std::int32_t>(row));
      return out;
    };
    std::vector<std::int32_t> all;
    for (std::int64_t of = 0; of < shares.ranks(); ++of)
      for (const std::int32_t row : rows_of(of)) all.push_back(row);
    return {
        at::tensor(all, at::kInt), at::tensor(rows_of(rank), at::kInt), {}, at::arange(shares.rows_of(rank), at::kInt)};
  }

  std::int64_t rows_;
  SetNumbers x_;
  Tensor above_k_, above_v_;
  std::vector<std::int32_t> ends_, depths_;
};

TEST_P(Sharded, AWaveIsThatOfOneRank) {
  const int ranks = std::get<0>(GetParam());
  for (const std::int64_t window : {0, 4}) {
    SCOPED_TRACE(window);
    const SetResults expected = of_one_rank(window);
    SetResults found(x_);
    found.path_k = at::zeros_like(expected.path_k), found.path_v = at::zeros_like(expected.path_v);
    std::mutex mutex;
    run_ranks({.cp = ranks}, [&](const Mesh& mesh) {
      const ModelShape shape = shape_of_rows();
      Arena arena(std::int64_t{1} << 20, cpu_device());
      OpenPath path(shape, kPath, at::kDouble, true, arena);
      fill_trunk(path, above_k_, above_v_, 1);
      const RowShares shares(rows_, ranks);
      const ShardedRows rows = placed(shares, mesh.cp.rank());
      ShardedSource source(path, kPath, false, ends(), depths(), shares, rows,
                           {shape, element_bytes(DType::float64), false}, at::kDouble, mesh.cp, arena);
      const Tensor own = rows.own_T.to(at::kLong);
      const Tensor q = x_.q.index_select(0, own), k = x_.k.index_select(0, own), v = x_.v.index_select(0, own);
      const Tensor out = at::zeros_like(q), lse = at::empty({kHeads, own.size(0)}, at::kDouble),
                   grad_q = at::zeros_like(q), grad_k = at::zeros_like(k), grad_v = at::zeros_like(v);
      const LayerAttention attention = attention_of(q, {k, v}, window);
      source.attend(attention, out, lse);
      source.add_backward(attention, out, lse, x_.grad_out.index_select(0, own), grad_q, {grad_k, grad_v});
      EXPECT_NO_THROW(path.expect_complete(1)) << "the wave is the trunk's one contribution";
      const std::lock_guard lock(mutex);
      found.out.index_add_(0, own, out), found.grad_q.index_add_(0, own, grad_q);
      found.grad_k.index_add_(0, own, grad_k), found.grad_v.index_add_(0, own, grad_v);
      // Every rank has a part of the path's gradient: what its own queries give.
      found.path_k += path.path(1, kPath).grad_k, found.path_v += path.path(1, kPath).grad_v;
    });
    EXPECT_TRUE(at::allclose(found.out, expected.out, kExact, kExact));
    EXPECT_TRUE(at::allclose(found.grad_q, expected.grad_q, kExact, kExact));
    EXPECT_TRUE(at::allclose(found.grad_k, expected.grad_k, kExact, kExact));
    EXPECT_TRUE(at::allclose(found.grad_v, expected.grad_v, kExact, kExact));
    EXPECT_TRUE(at::allclose(found.path_k, expected.path_k, kExact, kExact));
    EXPECT_TRUE(at::allclose(found.path_v, expected.path_v, kExact, kExact));
  }
}

// A trunk's keys and values stand in the path of every rank, and what the path has gathered goes to the rank of each
// row.
TEST_P(Sharded, ATrunkLeavesItsKeysOnEveryRankAndGetsItsGradientsBack) {
  const int ranks = std::get<0>(GetParam());
  const Tensor below_k = at::randn_like(x_.k), below_v = at::randn_like(x_.v);  // what waves add, on the first rank
  Tensor grad_k = at::zeros_like(x_.k), grad_v = at::zeros_like(x_.v);
  std::mutex mutex;
  run_ranks({.cp = ranks}, [&](const Mesh& mesh) {
    const ModelShape shape = shape_of_rows();
    Arena arena(std::int64_t{1} << 20, cpu_device());
    OpenPath path(shape, rows_, at::kDouble, true, arena);
    path.push(rows_, 1);
    const RowShares shares(rows_, ranks);
    const ShardedRows rows = placed(shares, mesh.cp.rank());
    ShardedSource source(path, 0, true, ends(), depths(), shares, rows, {shape, element_bytes(DType::float64), false},
                         at::kDouble, mesh.cp, arena);
    const Tensor own = rows.own_T.to(at::kLong);
    const Tensor q = x_.q.index_select(0, own), k = x_.k.index_select(0, own), v = x_.v.index_select(0, own);
    const Tensor out = at::zeros_like(q), lse = at::empty({kHeads, own.size(0)}, at::kDouble),
                 grad_q = at::zeros_like(q);
    const KeysValues grad_own{at::zeros_like(k), at::zeros_like(v)};
    const LayerAttention attention = attention_of(q, {k, v}, 0);
    source.attend(attention, out, lse);
    const OpenPath::Layer top = path.top(1);
    {
      const std::lock_guard lock(mutex);
      EXPECT_TRUE(top.k.flatten(1).equal(x_.k));
      EXPECT_TRUE(top.v.flatten(1).equal(x_.v));
    }
    const Tensor no_gradient = at::zeros_like(out);
    EXPECT_THROW(source.add_backward(attention, out, lse, no_gradient, grad_q, grad_own), InternalError)
        << "the wave below is missing";
    if (mesh.cp.rank() == 0) top.grad_k.add_(below_k.view_as(top.grad_k)), top.grad_v.add_(below_v.view_as(top.grad_v));
    path.count_contribution(1, rows_);
    source.add_backward(attention, out, lse, no_gradient, grad_q, grad_own);
    const std::lock_guard lock(mutex);
    grad_k.index_add_(0, own, grad_own.k), grad_v.index_add_(0, own, grad_own.v);
  });
  EXPECT_TRUE(grad_k.equal(below_k));
  EXPECT_TRUE(grad_v.equal(below_v));
}

// With one row of three ranks two have none.
INSTANTIATE_TEST_SUITE_P(Ranks, Sharded,
                         ::testing::Values(std::tuple{2, std::int64_t{9}}, std::tuple{2, std::int64_t{4}},
                                           std::tuple{3, std::int64_t{7}}, std::tuple{3, std::int64_t{1}}),
                         [](const auto& info) {
                           return std::to_string(std::get<0>(info.param)) + "ranks" +
                                  std::to_string(std::get<1>(info.param)) + "rows";
                         });

}  // namespace
}  // namespace espalier
