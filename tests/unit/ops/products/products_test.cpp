// The library's matrix products in bfloat16, as the processor makes them and widened, against float64.
#include "espalier/ops/operations.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "espalier/base/instruction_set.h"
#include "espalier/device/device.h"
#include "espalier/machine/memory.h"
#include "espalier/ops/cpu/compiled_products.h"
#include "espalier/ops/cpu/widened_products.h"
#include "tests/with_products.h"

namespace espalier {
namespace {

const Operations& ops = cpu_device().operations();

struct Sizes {
  std::int64_t rows, outputs, inputs;
};
// Within a panel of 1,024, at its edge, beyond it along each dimension; within, at and beyond pieces of 8, 32 and 256
// rows; and with nothing to multiply.
constexpr Sizes kSizes[] = {{3, 5, 7},     {1, 1, 1},     {1024, 16, 1024}, {1030, 9, 40}, {20, 1100, 24},
                            {9, 12, 2060}, {8, 40, 48},   {32, 40, 48},     {33, 40, 48},  {255, 40, 48},
                            {256, 40, 48}, {260, 40, 48}, {290, 40, 48},    {0, 4, 8},     {4, 8, 0}};

at::Tensor random(at::IntArrayRef sizes, at::ScalarType dtype = at::kBFloat16) {
  return at::randn(sizes, at::kFloat).to(dtype);
}

// The loss allowed: half a unit in the last place of the rounded number, twice, and 2^-24 of the sum of absolute values
// at each addition of a float32 sum.
at::Tensor allowed(const at::Tensor& rounded, const at::Tensor& magnitudes, std::int64_t terms) {
  return 0x1p-8 * rounded.abs() + static_cast<double>(terms + 2) * 0x1p-24 * magnitudes;
}

void expect_near(const at::Tensor& found, const at::Tensor& exact, const at::Tensor& allowed) {
  const at::Tensor over = (found.to(at::kDouble) - exact).abs() - allowed;
  if (over.numel() > 0) {
    EXPECT_LE(over.max().item<double>(), 0);
  }
}

at::Tensor piece_of(const at::Tensor& x_RW, std::int64_t row) {
  return x_RW.narrow(0, row, std::min(kSmallPieceRows, x_RW.size(0) - row));
}

class ProductsOf : public ::testing::TestWithParam<Bfloat16Products> {
 protected:
  void SetUp() override {
    if (!processor_has(GetParam())) GTEST_SKIP() << "this processor has no " << name_of(GetParam());
    before_ = bfloat16_products();
    force_bfloat16_products(GetParam());
    if (bfloat16_products() != GetParam())
      GTEST_SKIP() << name_of(instruction_set()) << " is in use, which has no " << name_of(GetParam());
    at::manual_seed(3);
  }
  void TearDown() override {
    if (processor_has(GetParam())) force_bfloat16_products(before_);
  }

  const WithProducts library_{false};
  Bfloat16Products before_ = Bfloat16Products::converted;
};

TEST_P(ProductsOf, AreThoseOfFloat64RoundedOnce) {
  for (const auto& [R, N, K] : kSizes) {
    SCOPED_TRACE(std::to_string(R) + " x " + std::to_string(N) + " x " + std::to_string(K));
    const at::Tensor x = random({R, K}), weight = random({N, K}), base = random({R, N}), grad = random({R, N});
    const at::Tensor x64 = x.to(at::kDouble), weight64 = weight.to(at::kDouble), grad64 = grad.to(at::kDouble);
    const at::Tensor forward = x64.mm(weight64.t()), magnitudes = x64.abs().mm(weight64.abs().t());
    at::Tensor out = at::empty_like(base);
    ops.linear(out, x, weight, at::Tensor());
    expect_near(out, forward, allowed(forward, magnitudes, K));
    ops.linear_onto(out, base, x, weight, at::Tensor());
    const at::Tensor onto = base.to(at::kDouble) + forward;
    expect_near(out, onto, allowed(onto, base.abs().to(at::kDouble) + magnitudes, K));
    at::Tensor grad_x = at::empty_like(x);
    ops.linear_grad_input(grad_x, grad, weight);
    const at::Tensor backward = grad64.mm(weight64), of_backward = grad64.abs().mm(weight64.abs());
    expect_near(grad_x, backward, allowed(backward, of_backward, N));
    grad_x.copy_(x);
    ops.add_linear_grad_input(grad_x, grad, weight);
    expect_near(grad_x, x64 + backward, allowed(x64 + backward, x64.abs() + of_backward, N));
  }
}

// A weight's gradient is added to a float32 sum: rounded to bfloat16 before where the processor multiplies bfloat16,
// with no more than float32's rounding where products are widened.
TEST_P(ProductsOf, AddTheGradientOfAWeightInFloat32) {
  const bool widened = widens_products(at::kBFloat16);
  EXPECT_EQ(widened, GetParam() == Bfloat16Products::converted);
  for (const auto& [R, N, K] : kSizes) {
    SCOPED_TRACE(std::to_string(R) + " x " + std::to_string(N) + " x " + std::to_string(K));
    const at::Tensor x = random({R, K}), grad = random({R, N}), before = random({N, K}, at::kFloat);
    const at::Tensor x64 = x.to(at::kDouble), grad64 = grad.to(at::kDouble);
    at::Tensor sum = before.clone();
    const Operations& ops = cpu_device().operations();
    EXPECT_EQ(ops.rounds_weight_gradients(at::kBFloat16), !widened);
    const at::Tensor rounded = widened ? at::Tensor() : at::empty({N, K}, at::kBFloat16);
    ops.add_linear_grad_weight(sum, at::Tensor(), grad, x, rounded);
    const at::Tensor product = grad64.t().mm(x64);
    const at::Tensor magnitudes = before.abs().to(at::kDouble) + grad64.abs().t().mm(x64.abs());
    at::Tensor rounded_products = at::zeros_like(product);
    if (!widened)
      for (std::int64_t row = 0; row < R; row += kSmallPieceRows)  // no less than with larger pieces
        rounded_products += piece_of(grad64, row).t().mm(piece_of(x64, row)).abs();
    expect_near(sum, before.to(at::kDouble) + product, allowed(rounded_products, magnitudes, R));
  }
}

// A kernel for each of 200 numbers of rows would be 120 MiB; in pieces none is new after the first ones.
TEST_P(ProductsOf, CompileNothingForAnotherNumberOfRows) {
  constexpr std::int64_t kInputs = 256, kOutputs = 512, kAllowed = 16 << 20;
  const at::Tensor weight = random({kOutputs, kInputs}), x = random({300, kInputs}), out = random({300, kOutputs});
  const auto multiply = [&](std::int64_t rows) {
    ops.linear(out.narrow(0, 0, rows), x.narrow(0, 0, rows), weight, at::Tensor());
  };
  for (const std::int64_t rows : {300, 5}) multiply(rows);
  const std::int64_t before = resident_bytes();
  for (std::int64_t rows = 33; rows < 233; ++rows) multiply(rows);
  EXPECT_LE(resident_bytes() - before, kAllowed);
}

// Weights of bfloat16 beside rows of float32: what all operations that read them make of the same numbers in float32.
class NarrowWeights : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override { at::manual_seed(5); }
  const WithProducts products_{GetParam()};
};

TEST_P(NarrowWeights, GiveTheBitsOfTheSameNumbersInFloat32) {
  for (const auto& [R, N, K] : kSizes) {
    SCOPED_TRACE(std::to_string(R) + " x " + std::to_string(N) + " x " + std::to_string(K));
    const at::Tensor weight = random({N, K}), wide = weight.to(at::kFloat), bias = random({N}, at::kFloat);
    const at::Tensor x = random({R, K}, at::kFloat), base = random({R, N}, at::kFloat);
    const auto expect_same = [&](const at::Tensor& start, auto&& product) {
      const at::Tensor found = start.clone(), wanted = start.clone();
      product(found, weight), product(wanted, wide);
      EXPECT_TRUE(found.equal(wanted));
      EXPECT_EQ(found.equal(start), R * N == 0 || K == 0);
    };
    expect_same(base,
                [&](const at::Tensor& out, const at::Tensor& w) { ops.linear_onto(out, out, x, w, at::Tensor()); });
    expect_same(x, [&](const at::Tensor& out, const at::Tensor& w) { ops.add_linear_grad_input(out, base, w); });
    if (K == 0) continue;
    expect_same(base, [&](const at::Tensor& out, const at::Tensor& w) { ops.linear(out, x, w, bias); });
    expect_same(x, [&](const at::Tensor& out, const at::Tensor& w) { ops.linear_grad_input(out, base, w); });
    const at::Tensor shared = random({2 * N, K}), part = shared.narrow(0, N, N);  // as a projection of several
    expect_same(base, [&](const at::Tensor& out, const at::Tensor& w) {
      ops.linear(out, x, w.is_same(weight) ? part : part.to(at::kFloat), bias);
    });
  }
}

TEST_P(NarrowWeights, AreHeldForRowsOfFloat32) {
  const at::Tensor weight = random({200, 70}), wide = weight.to(at::kFloat), x = random({3, 70}, at::kFloat);
  at::Tensor held = at::empty({3, 200}, at::kFloat), plain = at::empty({3, 200}, at::kFloat);
  ops.linear(plain, x, wide, at::Tensor());
  const std::shared_ptr<void> panels = ops.hold_weights({weight}, at::kFloat, std::int64_t{1} << 30);
  EXPECT_EQ(panels != nullptr, GetParam());
  ops.linear(held, x, weight, at::Tensor());
  EXPECT_TRUE(held.equal(plain));
}

TEST_P(NarrowWeights, AreLookedUpInFloat32) {
  const at::Tensor table = random({40, 33}), id = at::tensor({7, 3, 12, 45, 10, 7}, at::kInt);
  const at::Tensor found = at::empty({6, 33}, at::kFloat), wanted = at::empty({6, 33}, at::kFloat);
  for (const std::int64_t first : {0, 5}) {
    ops.look_up(table, id, first, found), ops.look_up(table.to(at::kFloat), id, first, wanted);
    EXPECT_TRUE(found.equal(wanted)) << first;
  }
}

INSTANTIATE_TEST_SUITE_P(Products, NarrowWeights, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "own" : "library"; });
INSTANTIATE_TEST_SUITE_P(Kinds, ProductsOf, ::testing::Values(Bfloat16Products::converted, Bfloat16Products::dot),
                         [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace espalier
