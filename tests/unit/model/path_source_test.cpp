// Rows over open trunks: attention of every row over its path and its own set against autograd on one dense sequence of
// scores, and the sums of the path's gradients over several sets.
#include "espalier/model/path_source.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/concat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randn_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/ops/cpu/operations.h"
#include "tests/support/layers.h"

namespace espalier {
namespace {

using at::Tensor;

constexpr std::int64_t kHeads = 4, kKeyHeads = 2, kDim = 4;
constexpr double kExact = 1e-12;  // float64 sums of at most 20 terms of size 1

ModelShape shape_of_rows() {
  ModelShape shape;
  shape.hidden = 8;
  shape.layer = attention_layers(2, {.heads = kHeads, .kv_heads = kKeyHeads, .head_dim = kDim}, 0);
  return shape;
}

// A set of rows: where the rows below each row end, and how deep each lies.
struct Rows {
  std::vector<std::int32_t> subtree_end, depth;
  std::int64_t path = 0;
  std::int64_t count() const { return static_cast<std::int64_t>(subtree_end.size()); }
};

// A row with two branches below it, of two rows and of one, over `path` rows.
Rows branches(std::int64_t path) {
  const auto p = static_cast<std::int32_t>(path);
  return {{4, 3, 3, 4}, {p, p + 1, p + 2, p + 1}, path};
}

struct Numbers {
  explicit Numbers(std::int64_t rows)
      : q(at::randn({rows, kHeads * kDim}, at::kDouble)),
        k(at::randn({rows, kKeyHeads * kDim}, at::kDouble)),
        v(at::randn({rows, kKeyHeads * kDim}, at::kDouble)),
        grad_out(at::randn({rows, kHeads * kDim}, at::kDouble)) {}
  Tensor q, k, v, grad_out;
};

// True where a row sees a key, dense: [T, P + T].
Tensor visible(const Rows& rows, std::int64_t window) {
  Tensor seen = at::zeros({rows.count(), rows.path + rows.count()}, at::kBool);
  for (std::int64_t i = 0; i < rows.count(); ++i) {
    for (std::int64_t j = 0; j < rows.path; ++j) seen[i][j] = window == 0 || rows.depth[i] - j < window;
    for (std::int64_t j = 0; j <= i; ++j)
      seen[i][rows.path + j] = i < rows.subtree_end[j] && (window == 0 || rows.depth[i] - rows.depth[j] < window);
  }
  return seen;
}

struct Dense {
  Tensor out, grad_q, grad_k, grad_v;  // the last two of path and own rows
};
Dense dense(const Rows& rows, const Numbers& x, const Tensor& path_k, const Tensor& path_v, std::int64_t window) {
  const Tensor q = x.q.clone().requires_grad_(), k = at::concat({path_k, x.k}).requires_grad_(),
               v = at::concat({path_v, x.v}).requires_grad_();
  const std::int64_t group = kHeads / kKeyHeads;
  const Tensor mask = visible(rows, window).logical_not();
  std::vector<Tensor> heads;
  for (std::int64_t h = 0; h < kHeads; ++h) {
    const auto of = [&](const Tensor& all, std::int64_t head) { return all.slice(1, head * kDim, (head + 1) * kDim); };
    const Tensor scores = of(q, h).mm(of(k, h / group).t()) / std::sqrt(static_cast<double>(kDim));
    heads.push_back(scores.masked_fill(mask, -INFINITY).softmax(1).mm(of(v, h / group)));
  }
  const Tensor out = at::concat(heads, 1);
  (out * x.grad_out).sum().backward();
  return {out.detach(), q.grad(), k.grad(), v.grad()};
}

class Source : public ::testing::Test {
 protected:
  Source() { at::manual_seed(5); }

  static Tensor numbers(const std::vector<std::int32_t>& values) {
    const Tensor out = at::empty({static_cast<std::int64_t>(values.size())}, at::kInt);
    std::ranges::copy(values, out.data_ptr<std::int32_t>());
    return out;
  }
  PathSource source(const Rows& rows, bool is_trunk = false) {
    return {path_, rows.path, is_trunk, numbers(rows.subtree_end), numbers(rows.depth)};
  }
  LayerAttention attention(const Numbers& x, const KeysValues& own, std::int64_t window = 0) const {
    LayerAttention out{cpu::operations(), nullptr, 1, kDim, {}, x.q, own};
    out.window = window;
    return out;
  }
  // Keys and values of a trunk whose rows are drawn, in layer 1.
  void open_trunk(std::int64_t rows, std::int64_t contributions) {
    path_.push(rows, contributions);
    path_.top(1).k.copy_(at::randn_like(path_.top(1).k));
    path_.top(1).v.copy_(at::randn_like(path_.top(1).v));
  }
  // Both directions of a wave; returns what it attended to.
  Tensor run_wave(const Rows& rows, const Numbers& x, const Tensor& grad_q, const KeysValues& grad_own,
                  std::int64_t window = 0) {
    PathSource wave = source(rows);
    const Tensor out = at::empty_like(x.q), lse = at::empty({kHeads, rows.count()}, at::kDouble);
    wave.attend(attention(x, {x.k, x.v}, window), out, lse);
    wave.add_backward(attention(x, {x.k, x.v}, window), out, lse, x.grad_out, grad_q, grad_own);
    return out;
  }

  Arena arena_{std::int64_t{1} << 20, cpu_device()};
  ArenaScope scope_{arena_};
  OpenPath path_{shape_of_rows(), 12, at::kDouble, true, arena_};
};

void expect_close(const Tensor& found, const Tensor& expected, const char* what) {
  EXPECT_TRUE(at::allclose(found.flatten(), expected.flatten(), kExact, kExact)) << what;
}

TEST_F(Source, AWaveAttendsToItsPathAndItsOwnRows) {
  for (const std::int64_t path : {0, 1, 5})
    for (const std::int64_t window : {0, 3}) {
      SCOPED_TRACE(::testing::Message() << path << " path rows, window " << window);
      if (path > 0) open_trunk(path, 1);
      const Rows rows = branches(path);
      const Numbers x(rows.count());
      const Tensor grad_q = at::empty_like(x.q);
      const KeysValues grad_own{at::zeros_like(x.k), at::zeros_like(x.v)};
      const Tensor out = run_wave(rows, x, grad_q, grad_own, window);
      const OpenPath::Layer above = path_.path(1, path);
      const Dense expected = dense(rows, x, above.k.flatten(1), above.v.flatten(1), window);
      expect_close(out, expected.out, "attended");
      expect_close(grad_q, expected.grad_q, "queries");
      expect_close(grad_own.k, expected.grad_k.slice(0, path), "own keys");
      expect_close(grad_own.v, expected.grad_v.slice(0, path), "own values");
      expect_close(above.grad_k, expected.grad_k.slice(0, 0, path), "keys of the path");
      expect_close(above.grad_v, expected.grad_v.slice(0, 0, path), "values of the path");
      if (path > 0) path_.pop();
    }
}

// The accumulators of both trunks hold the sum over all waves that see them, and their gradient is read once it is
// whole.
TEST_F(Source, ThePathsGradientsAreSumsOverTheSetsBelow) {
  open_trunk(3, 3);
  Tensor expected_k = at::zeros({3, kKeyHeads * kDim}, at::kDouble), expected_v = expected_k.clone();
  const auto run = [&](std::int64_t path) {
    const Rows rows = branches(path);
    const Numbers x(rows.count());
    const OpenPath::Layer above = path_.path(1, path);
    const Dense alone = dense(rows, x, above.k.flatten(1), above.v.flatten(1), 0);
    run_wave(rows, x, at::empty_like(x.q), {at::zeros_like(x.k), at::zeros_like(x.v)});
    expected_k += alone.grad_k.slice(0, 0, 3), expected_v += alone.grad_v.slice(0, 0, 3);
  };
  open_trunk(4, 2);
  run(7);
  run(7);
  path_.pop();
  PathSource trunk = source({{1, 2, 3}, {0, 1, 2}, 0}, true);
  EXPECT_THROW(trunk.gathered(1), InternalError) << "one of three is missing";
  run(3);
  const KeysValues gathered = trunk.gathered(1);
  expect_close(gathered.k, expected_k, "keys");
  expect_close(gathered.v, expected_v, "values");
}

// Layer 0 has a window: of each trunk it keeps the rows that rows below it can see, and their gradients are the same
// as with the whole path. Layer 1 keeps all rows.
TEST_F(Source, ALayerWithAWindowKeepsWhatItShowsBelowEachTrunk) {
  constexpr std::int64_t kWindow = 5, kFirst = 140, kSecond = 3, kPath = kFirst + kSecond;
  ModelShape shape = shape_of_rows();
  testing::change_attention(shape, [](AttentionShape& a, std::size_t layer) { a.window = layer == 0 ? kWindow : 0; });
  Arena arena(std::int64_t{1} << 22, cpu_device());
  const ArenaScope scope(arena);
  ASSERT_EQ(first_window_row(kFirst, kWindow), 128);
  OpenPath path(shape, kPath, at::kDouble, true, arena, nullptr, 0, window_rows_kept(0, kFirst, kWindow) + kSecond);
  const Tensor k = at::randn({kPath, kKeyHeads * kDim}, at::kDouble), v = at::randn_like(k);
  const auto source_of = [&](const Rows& rows, bool trunk) {
    return PathSource(path, rows.path, trunk, numbers(rows.subtree_end),
                      numbers(rows.depth) - path.first_row(rows.path));
  };
  const auto attention_of = [&](const Numbers& x, const KeysValues& own) {
    LayerAttention out = attention(x, own, kWindow);
    out.layer = out.source = 0;
    return out;
  };
  const auto trunk_rows = [&](std::int64_t begin, std::int64_t rows) {
    Rows trunk{{}, {}, begin};
    for (std::int64_t i = 0; i < rows; ++i) {
      trunk.subtree_end.push_back(static_cast<std::int32_t>(rows));
      trunk.depth.push_back(static_cast<std::int32_t>(begin + i));
    }
    return trunk;
  };
  const auto open = [&](std::int64_t rows, std::int64_t contributions) {
    const std::int64_t begin = path.rows();
    path.push(rows, contributions);
    PathSource trunk = source_of(trunk_rows(begin, rows), true);
    EXPECT_FALSE(trunk.keeps(0));
    EXPECT_TRUE(trunk.keeps(1));
    trunk.leave(attention_of(Numbers(rows), {k.slice(0, begin, begin + rows), v.slice(0, begin, begin + rows)}));
  };
  Tensor expected_k = at::zeros_like(k), expected_v = at::zeros_like(v);
  const auto run_wave = [&](std::int64_t above) {
    const Rows rows = branches(above);
    const Numbers x(rows.count());
    const Dense alone = dense(rows, x, k.slice(0, 0, above), v.slice(0, 0, above), kWindow);
    PathSource wave = source_of(rows, false);
    const Tensor out = at::empty_like(x.q), lse = at::empty({kHeads, rows.count()}, at::kDouble),
                 grad_q = at::empty_like(x.q);
    const LayerAttention own = attention_of(x, {x.k, x.v});
    wave.attend(own, out, lse);
    wave.add_backward(own, out, lse, x.grad_out, grad_q, {at::zeros_like(x.k), at::zeros_like(x.v)});
    expect_close(out, alone.out, "attended");
    expect_close(grad_q, alone.grad_q, "queries");
    expected_k.slice(0, 0, above) += alone.grad_k.slice(0, 0, above);
    expected_v.slice(0, 0, above) += alone.grad_v.slice(0, 0, above);
  };
  const auto expect_gathered = [&](std::int64_t begin, std::int64_t rows) {
    const KeysValues gathered{at::zeros({rows, kKeyHeads * kDim}, at::kDouble),
                              at::zeros({rows, kKeyHeads * kDim}, at::kDouble)};
    source_of(trunk_rows(begin, rows), true).add_gathered(cpu::operations(), 0, gathered);
    expect_close(gathered.k, expected_k.slice(0, begin, begin + rows), "keys of a trunk");
    expect_close(gathered.v, expected_v.slice(0, begin, begin + rows), "values of a trunk");
  };
  open(kFirst, 3);
  open(kSecond, 2);
  EXPECT_EQ(path.path(0, kPath).k.size(0), kPath - first_window_row(kPath, kWindow));
  EXPECT_EQ(path.path(1, kPath).k.size(0), kPath);
  run_wave(kPath);
  run_wave(kPath);
  expect_gathered(kFirst, kSecond);
  path.pop();
  run_wave(kFirst);
  expect_gathered(0, kFirst);
}

TEST_F(Source, ATrunkKeepsItsKeysAndValuesAtTheTopOfThePath) {
  open_trunk(3, 1);
  path_.push(2, 0);
  const PathSource trunk = source({{2, 2}, {3, 4}, 3}, true), wave = source({{2, 2}, {3, 4}, 3});
  ASSERT_TRUE(trunk.keeps(1));
  const KeysValues kept = trunk.kept(1);
  kept.k.fill_(7), kept.v.fill_(8);
  EXPECT_TRUE(path_.path(1, 5).k.slice(0, 3).eq(7).all().item<bool>());
  EXPECT_TRUE(path_.path(1, 5).v.slice(0, 3).eq(8).all().item<bool>());
  EXPECT_FALSE(path_.path(1, 3).k.eq(7).any().item<bool>()) << "those of the trunk above";
  EXPECT_FALSE(wave.keeps(1));
  EXPECT_FALSE(wave.kept(1).k.defined());
  EXPECT_FALSE(wave.gathered(1).k.defined());
}

}  // namespace
}  // namespace espalier
