// Emulated kernels that give a row the same bits beside any other rows, in any number of rows and at any place among
// them; and the cases in which attention does not (docs/cuda.md).
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/concat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "espalier/selftest/operation_check.h"
#include "tests/cuda/emulated_runtime.h"

namespace espalier::testing {
namespace {

using Tensors = std::vector<at::Tensor>;

Device& device() { return emulated_device(); }
const Operations& ops() { return device().operations(); }
at::Tensor there(const at::Tensor& x) { return device().adopt(x.contiguous()); }
at::Tensor room(at::IntArrayRef sizes, at::ScalarType dtype) { return device().adopt(at::zeros(sizes, dtype)); }
at::Tensor here(const at::Tensor& x) { return device().to_host(x); }
at::Tensor counted(std::int64_t count) { return at::arange(count, at::kInt); }

// Inputs and results have a row for each row.
using RowOperation = std::function<Tensors(const Tensors& rows)>;

Tensors chosen(const Tensors& rows, const at::Tensor& which) {
  Tensors some;
  for (const at::Tensor& x : rows) some.push_back(x.index_select(0, which));
  return some;
}

// All rows, against all in another order, some neighbours, and one alone.
void expect_rows_alike(const std::string& name, const Tensors& rows, const RowOperation& operation) {
  const std::int64_t R = rows[0].size(0);
  const Tensors all = operation(rows);
  for (const at::Tensor& which :
       {at::remainder(at::arange(R, at::kLong) * 7 + 3, R), at::arange(R - 5, R, at::kLong),
        at::full({1}, 0, at::kLong), at::full({1}, R / 2, at::kLong), at::full({1}, R - 1, at::kLong)})
    EXPECT_TRUE(same_bits(operation(chosen(rows, which)), chosen(all, which)))
        << name << ", " << which.numel() << " rows";
}

constexpr std::int64_t kRows = 37;  // no multiple of 7
constexpr at::ScalarType kTypes[] = {at::kFloat, at::kBFloat16};

TEST(Rows, OfNormsHaveTheSameBitsAnywhere) {
  for (const at::ScalarType dtype : kTypes)
    for (const std::int64_t width : {40, 1000}) {
      const at::Tensor weight = there(normal({width}, 1).to(dtype));
      expect_rows_alike("norm", {normal({kRows, width}, 2).to(dtype)}, [&](const Tensors& rows) {
        const at::Tensor y = room(rows[0].sizes(), dtype), rstd = room({rows[0].size(0)}, at::kFloat);
        ops().norm(there(rows[0]), weight, 1e-6, y, rstd);
        return Tensors{here(y), here(rstd)};
      });
    }
}

TEST(Rows, OfRotatedHeadsHaveTheSameBitsAnywhere) {
  constexpr std::int64_t kHeads = 3, D = 16;
  const RotaryTables tables{there(normal({kRows, D / 2}, 1).to(at::kFloat)),
                            there(normal({kRows, D / 2}, 2).to(at::kFloat))};
  for (const at::ScalarType dtype : kTypes)
    for (const bool normed : {false, true}) {
      const at::Tensor weight = normed ? there(normal({D}, 3).to(dtype)) : at::Tensor();
      expect_rows_alike("rotate", {normal({kRows, kHeads * D}, 4).to(dtype), counted(kRows)}, [&](const Tensors& rows) {
        const at::Tensor out = room(rows[0].sizes(), dtype);
        ops().rotate({tables, there(rows[1]), weight, 1e-6}, there(rows[0]), out);
        return Tensors{here(out)};
      });
    }
}

TEST(Rows, OfActivationsHaveTheSameBitsAnywhere) {
  for (const at::ScalarType dtype : kTypes)
    expect_rows_alike("swiglu", {normal({kRows, 2 * 24}, 1).to(dtype)}, [&](const Tensors& rows) {
      const at::Tensor act = room({rows[0].size(0), 24}, dtype);
      ops().swiglu({}, there(rows[0]), act);
      return Tensors{here(act)};
    });
}

// The log-prob and entropy of a token of each row, and a token drawn from each.
TEST(Rows, OfLogitsHaveTheSameBitsAnywhere) {
  constexpr std::int64_t V = 700;
  const Tensors logits{normal({kRows, V}, 1, 3).to(at::kFloat), counted(kRows) * 11,
                       normal({kRows}, 2).abs().remainder(1)};
  expect_rows_alike("log-probs", logits, [](const Tensors& rows) {
    const std::int64_t B = rows[0].size(0);
    const at::Tensor raw = room({B}, at::kDouble), log_prob = room({B}, at::kDouble), entropy = room({B}, at::kDouble);
    const EdgeBlock edges{there(at::full({B}, 0.9, at::kDouble)), there(counted(B + 1)), there(rows[1])};
    const LogitSums sums{room({B}, at::kDouble), room({B}, at::kDouble), room({B}, at::kDouble)};
    ops().logit_sums(edges, 0, there(rows[0]), sums, raw);
    ops().score_edges(edges, raw, sums, log_prob, entropy);
    return Tensors{here(log_prob), here(entropy)};
  });
  expect_rows_alike("choices", logits, [](const Tensors& rows) {
    const std::int64_t B = rows[0].size(0);
    const at::Tensor token = room({B}, at::kDouble), log_prob = room({B}, at::kDouble);
    const at::Tensor kept = room({B, (rows[0].size(1) + 31) / 32}, at::kInt);
    ops().choose_tokens(there(rows[0]), {.temperature = 0.8, .top_k = 50, .top_p = 0.9}, there(counted(B + 1)),
                        there(rows[2]), token, log_prob, kept);
    return Tensors{here(token), here(log_prob), here(kept)};
  });
}

TEST(Rows, OfRoutersHaveTheSameBitsAnywhere) {
  for (const at::ScalarType dtype : kTypes)
    expect_rows_alike("router", {normal({kRows, 70}, 1).to(dtype)}, [&](const Tensors& rows) {
      const at::Tensor choice = room({rows[0].size(0), 3}, at::kInt), weight = room({rows[0].size(0), 3}, at::kFloat);
      ops().choose_experts(there(rows[0]), at::Tensor(), true, choice, weight);
      return Tensors{here(choice), here(weight)};
    });
}

// ---- attention ----

// Branches of `rows` rows below a path. Branch `wanted` has the same numbers in each, the others have others.
struct Branches {
  std::int64_t path, before, rows, behind;  // rows of the path, own rows before the branch, its own, own rows behind it
  std::int64_t first_query = 0;             // of the branch; those before have none then
  std::int64_t head_dim = 64;

  // out and lse of the branch's queries.
  Tensors run(at::ScalarType dtype) const {
    constexpr std::int64_t kHeads = 2;
    const std::int64_t D = head_dim, T = before + rows + behind;
    const auto own = [&](std::int64_t width, std::uint64_t seed) {
      return at::concat({normal({before, width}, 100 + seed), normal({rows, width}, seed),
                         normal({behind, width}, 200 + seed)})
          .to(dtype);
    };
    std::vector<std::int32_t> ends, queries;
    for (std::int64_t i = 0; i < T; ++i) {
      ends.push_back(static_cast<std::int32_t>(i < before ? before : i < before + rows ? before + rows : T));
      if (first_query == 0 || i >= before + first_query) queries.push_back(static_cast<std::int32_t>(i));
    }
    const at::Tensor query_row = whole_numbers(queries), q = own(kHeads * D, 1).index_select(0, query_row);
    const auto Q = static_cast<std::int64_t>(queries.size());
    const at::Tensor out = room({Q, kHeads * D}, dtype), lse = room({kHeads, Q}, at::kFloat);
    ops().attention({D, there(q), there(own(D, 2)), there(own(D, 3)), there(normal({path, D}, 4).to(dtype)),
                     there(normal({path, D}, 5).to(dtype)), there(query_row), there(whole_numbers(ends))},
                    out, lse);
    const std::int64_t first = first_query == 0 ? before : 0, count = rows - first_query;
    return {here(out).narrow(0, first, count).contiguous(), here(lse).narrow(1, first, count).contiguous()};
  }
};

Tensors without_first_rows(const Tensors& all, std::int64_t rows) {
  return {all[0].narrow(0, rows, all[0].size(0) - rows).contiguous(),
          all[1].narrow(1, rows, all[1].size(1) - rows).contiguous()};
}

// Keys are summed tile by tile: the path's, then own rows [0, 64), [64, 128), ... A tile that a row does not see
// adds nothing to it, also where another row of its block does. The plain kernel takes 32 keys at a time and begins no
// new step where own rows begin: with a path of 70 the first own rows are in one with the path's last.
TEST(Attention, HasTheSameBitsBesideOtherBranchesWhileItsKeysKeepTheirTiles) {
  for (const auto& [dtype, path] : {std::pair{at::kBFloat16, 70}, std::pair{at::kFloat, 96}}) {
    const Tensors alone = Branches{path, 0, 90, 0}.run(dtype);
    EXPECT_TRUE(same_bits(Branches{path, 0, 90, 50}.run(dtype), alone)) << "rows behind";
    EXPECT_TRUE(same_bits(Branches{path, 128, 90, 0}.run(dtype), alone)) << "whole tiles before";
    EXPECT_TRUE(same_bits(Branches{path, 64, 90, 100}.run(dtype), alone)) << "both";
    // Queries of the last rows alone stand elsewhere in their block.
    EXPECT_TRUE(same_bits(Branches{path, 64, 90, 5, 33}.run(dtype), without_first_rows(alone, 33))) << "some queries";
  }
}

// With other tiles, sums are of other parts: the same rows, other roundings.
TEST(Attention, HasOtherBitsWhereKeysFallIntoOtherTiles) {
  EXPECT_FALSE(same_bits(Branches{70, 128, 90, 0}.run(at::kFloat), Branches{70, 0, 90, 0}.run(at::kFloat)));
  const Tensors alone = Branches{70, 0, 90, 0}.run(at::kBFloat16), shifted = Branches{70, 17, 90, 0}.run(at::kBFloat16);
  EXPECT_FALSE(same_bits(shifted, alone));
  EXPECT_TRUE(at::allclose(shifted[1], alone[1], 1e-5, 1e-5));
}

}  // namespace
}  // namespace espalier::testing
