// Own products against their order of sums, written out a number at a time: the same bits under every instruction set,
// for every shape, layout and number of threads. It follows that a row does not depend on the rows beside it.
#include "espalier/ops/cpu/own_products.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "espalier/base/instruction_set.h"
#include "espalier/base/nf4.h"
#include "espalier/base/quantised_rows.h"

namespace espalier::own_products {
namespace {

template <class T>
accumulator_t<T> number(T x) {
  return static_cast<accumulator_t<T>>(x);
}

// The order of sums of docs/mathematics.md, or with one fault in it that tiles, edges or threads could make.
enum class Fault { none, blocks_cut_elsewhere, edge_columns_not_fused, steps_split_in_two, pairs_ascending };

template <class T, class Out>
void defined(const Product<T, Out>& p, std::vector<Out>& out, Fault fault = Fault::none) {
  const std::int64_t cut = fault == Fault::blocks_cut_elsewhere ? 3 * kSumBlock<T> / 4
                           : fault == Fault::steps_split_in_two ? std::max<std::int64_t>(2, p.steps / 4 * 2)
                                                                : kSumBlock<T>;
  using A = accumulator_t<T>;
  const auto at = [](const Factor<T>& f, std::int64_t line, std::int64_t step) {
    return number(f.data[f.steps_adjacent ? line * f.stride + step : step * f.stride + line]);
  };
  for (std::int64_t row = 0; row < p.rows; ++row)
    for (std::int64_t column = 0; column < p.columns; ++column) {
      A sum = p.base ? number(p.base[row * p.base_stride + column]) : A(0);
      const bool fused = fault != Fault::edge_columns_not_fused || column < p.columns / 8 * 8;
      for (std::int64_t block = 0; block < p.steps; block += cut) {
        A chain = 0;
        for (std::int64_t k = block; k < block + cut; ++k) {
          const std::int64_t step = sizeof(T) == 2 && fault != Fault::pairs_ascending ? k ^ 1 : k;
          if (step < p.steps) {
            const A a = at(p.a, row, step), b = at(p.b, column, step);
            if (instruction_set() == InstructionSet::baseline || !fused) {
              const volatile A product = a * b;  // rounded on its own
              chain += product;
            } else {
              chain = std::fma(a, b, chain);
            }
          }
        }
        sum = block == 0 && !p.base ? chain : sum + chain;
      }
      out[static_cast<std::size_t>(row * p.out_stride + column)] = static_cast<Out>(sum);
    }
}

template <class T>
std::vector<T> random_numbers(std::int64_t count, std::uint32_t seed) {
  std::mt19937 bits(seed);
  std::normal_distribution<double> normal;
  std::vector<T> numbers(static_cast<std::size_t>(count));
  for (T& x : numbers) x = static_cast<T>(static_cast<accumulator_t<T>>(normal(bits)));
  return numbers;
}

struct Sizes {
  std::int64_t rows, columns, steps;
};
// Rows and columns at and around the edges of tiles (6 and 14 rows), panels (4 to 32 columns) and the rows that are
// rounded at once (512); steps at and around the edges of vectors and blocks (256, 512 and 1,024).
constexpr Sizes kSizes[] = {{1, 1, 1},    {1, 33, 7},    {2, 64, 513},  {3, 31, 2}, {5, 40, 1025}, {6, 8, 256},
                            {7, 9, 257},  {13, 32, 512}, {14, 65, 96},  {15, 5, 1}, {16, 16, 16},  {28, 7, 2050},
                            {29, 130, 3}, {43, 17, 61},  {515, 33, 40}, {1, 700, 3}};

enum class Base { none, other, out };

struct alignas(64) PanelLine {
  std::byte bytes[64];
};

template <class T, class Out>
void expect_defined(const Sizes& s, bool a_adjacent, bool b_adjacent, Base kind, int threads) {
  const auto a = random_numbers<T>(s.rows * s.steps, 1), b = random_numbers<T>(s.columns * s.steps, 2);
  const std::int64_t stride = s.columns + 3;  // what stands between rows stays
  const auto before = random_numbers<Out>(s.rows * stride, 3), base = random_numbers<Out>(s.rows * stride, 4);
  std::vector<Out> found = before, expected = before;
  Product<T, Out> p{s.rows,
                    s.columns,
                    s.steps,
                    {a.data(), a_adjacent ? s.steps : s.rows, a_adjacent},
                    {b.data(), b_adjacent ? s.steps : s.columns, b_adjacent},
                    kind == Base::none    ? nullptr
                    : kind == Base::other ? base.data()
                                          : found.data(),
                    stride,
                    found.data(),
                    stride};
  const Product<T, Out> of_expected = [&] {
    Product<T, Out> same = p;
    if (kind == Base::out) same.base = before.data();
    return same;
  }();
  defined(of_expected, expected);
  std::vector<PanelLine> panels(static_cast<std::size_t>(panel_bytes<T>(s.columns, s.steps)) / sizeof(PanelLine) + 1);
  pack_panels(p.b, s.columns, s.steps, panels.data());
  for (const void* held : {static_cast<const void*>(nullptr), static_cast<const void*>(panels.data())}) {
    std::ranges::copy(before, found.begin());
    p.b.panels = held;
    multiply(p, threads);
    ASSERT_EQ(std::memcmp(found.data(), expected.data(), found.size() * sizeof(Out)), 0)
        << s.rows << " x " << s.columns << " x " << s.steps << (a_adjacent ? "" : ", a transposed")
        << (b_adjacent ? "" : ", b transposed") << ", base " << static_cast<int>(kind) << ", " << threads << " threads"
        << (held ? ", panels held" : "");
  }
}

// b: a quantised matrix [outputs, inputs], its outputs the columns of the product or its steps.
template <class T, class Out>
void expect_quantised(std::int64_t rows, std::int64_t outputs, std::int64_t inputs, const quantised::Matrix& matrix,
                      int threads) {
  const std::int64_t bytes = quantised::row_bytes(matrix.form(), inputs);
  std::vector<std::byte> packed(static_cast<std::size_t>(outputs * bytes));
  std::vector<float> values(static_cast<std::size_t>(outputs * inputs));
  for (std::int64_t n = 0; n < outputs; ++n) {
    matrix.write_row(n, 0, inputs, inputs, packed.data() + n * bytes);
    quantised::row_values(packed.data() + n * bytes, 0, inputs, values.data() + n * inputs);
  }
  std::vector<T> b;
  for (const float x : values) b.push_back(static_cast<T>(x));
  for (const bool turned : {true, false}) {
    const std::int64_t columns = turned ? outputs : inputs, steps = turned ? inputs : outputs;
    const auto a = random_numbers<T>(rows * steps, 6);
    std::vector<Out> found(static_cast<std::size_t>(rows * columns)), expected = found;
    Product<T, Out> p{rows, columns,         steps,  {a.data(), steps, true}, {b.data(), inputs, turned}, nullptr,
                      0,    expected.data(), columns};
    multiply(p, 1);
    p.b = {nullptr, bytes, turned, nullptr, nullptr, packed.data()};
    p.out = found.data();
    multiply(p, threads);
    ASSERT_EQ(std::memcmp(found.data(), expected.data(), found.size() * sizeof(Out)), 0)
        << rows << " rows, [" << outputs << ", " << inputs << "]" << (turned ? "" : ", by rows") << ", kind "
        << static_cast<int>(matrix.form().kind) << ", " << threads << " threads";
  }
}

template <class T, class Out>
void expect_nf4(std::int64_t rows, std::int64_t outputs, std::int64_t inputs, nf4::Rounding rounding, int threads) {
  const auto numbers = random_numbers<float>(outputs * inputs, 5);
  expect_quantised<T, Out>(
      rows, outputs, inputs,
      nf4::quantise(outputs, inputs, rounding,
                    [&](std::int64_t n, float* out) { std::copy_n(numbers.begin() + n * inputs, inputs, out); }),
      threads);
}

// With blocks that divide no side.
template <class T, class Out>
void expect_fp8(std::int64_t rows, std::int64_t outputs, std::int64_t inputs, int threads) {
  const auto numbers = random_numbers<float>(outputs * inputs, 5);
  const quantised::Form form{.kind = quantised::Kind::fp8, .block_rows = 24, .block_columns = 40};
  const auto matrix = quantised::rows_of(form.kind).quantise(form, outputs, inputs, [&](std::int64_t n, float* out) {
    std::copy_n(numbers.begin() + n * inputs, inputs, out);
  });
  expect_quantised<T, Out>(rows, outputs, inputs, *matrix, threads);
}

template <class T, class Out>
void expect_fp8() {
  for (const auto& [rows, outputs, inputs] : {Sizes{3, 5, 63}, Sizes{17, 33, 191}, Sizes{5, 70, 1087}})
    expect_fp8<T, Out>(rows, outputs, inputs, 1);
  for (const int threads : {2, 3}) expect_fp8<T, Out>(520, 130, 321, threads);
}

template <class T, class Out>
void expect_nf4() {
  for (const nf4::Rounding rounding : {nf4::Rounding::bfloat16, nf4::Rounding::float16, nf4::Rounding::float32})
    for (const auto& [rows, outputs, inputs] : {Sizes{3, 5, 64}, Sizes{17, 33, 192}, Sizes{5, 70, 1088}})
      expect_nf4<T, Out>(rows, outputs, inputs, rounding, 1);
  for (const int threads : {2, 3}) expect_nf4<T, Out>(520, 130, 320, nf4::Rounding::bfloat16, threads);
}

class OwnProducts : public ::testing::TestWithParam<InstructionLevel> {
 protected:
  void SetUp() override {
    if (!processor_has(GetParam())) GTEST_SKIP() << "this processor has no " << GetParam().name;
    set_ = instruction_set();
    force_instruction_set(GetParam().set);
    products_ = bfloat16_products();
    force_bfloat16_products(GetParam().products);
    forced_ = true;
  }
  void TearDown() override {
    if (!forced_) return;
    force_bfloat16_products(products_);
    force_instruction_set(set_);
  }

  template <class T, class Out>
  void expect_all() {
    for (const Sizes& s : kSizes)
      for (const bool a_adjacent : {true, false})
        for (const bool b_adjacent : {true, false})
          for (const Base base : {Base::none, Base::other, Base::out})
            expect_defined<T, Out>(s, a_adjacent, b_adjacent, base, 1);
    for (const Sizes& s : {Sizes{67, 70, 300}, Sizes{5, 2000, 130}, Sizes{2000, 5, 130}})  // work for several threads
      for (const bool a_adjacent : {true, false})
        for (const int threads : {2, 3, 8}) expect_defined<T, Out>(s, a_adjacent, a_adjacent, Base::out, threads);
  }

 private:
  bool forced_ = false;
  InstructionSet set_ = InstructionSet::baseline;
  Bfloat16Products products_ = Bfloat16Products::converted;
};

// The comparison notices each fault: some number of a product has other bits with it.
template <class T, class Out>
void expect_noticed(Fault fault) {
  const Sizes s{4, 13, 1600};
  const auto a = random_numbers<T>(s.rows * s.steps, 1), b = random_numbers<T>(s.columns * s.steps, 2);
  std::vector<Out> found(static_cast<std::size_t>(s.rows * s.columns)), expected = found;
  const Product<T, Out> p{s.rows, s.columns,    s.steps,  {a.data(), s.steps, true}, {b.data(), s.steps, true}, nullptr,
                          0,      found.data(), s.columns};
  multiply(p, 1);
  defined(p, expected);
  EXPECT_EQ(std::memcmp(found.data(), expected.data(), found.size() * sizeof(Out)), 0);
  defined(p, expected, fault);
  EXPECT_NE(std::memcmp(found.data(), expected.data(), found.size() * sizeof(Out)), 0) << static_cast<int>(fault);
}

TEST(OwnProductsFaults, AreNoticed) {
  if (instruction_set() == InstructionSet::baseline) GTEST_SKIP() << "this processor has no fused multiply-adds";
  for (const Fault fault : {Fault::blocks_cut_elsewhere, Fault::edge_columns_not_fused, Fault::steps_split_in_two}) {
    expect_noticed<float, float>(fault);
    expect_noticed<double, double>(fault);
    if (fault != Fault::edge_columns_not_fused) expect_noticed<bfloat16, float>(fault);  // its products are exact
  }
  expect_noticed<bfloat16, float>(Fault::pairs_ascending);
}

class OwnBfloat16Products : public OwnProducts {};  // under the levels that differ in bfloat16 alone as well

TEST_P(OwnProducts, OfFloat32HaveTheDefinedOrder) { expect_all<float, float>(); }
TEST_P(OwnProducts, OfFloat64HaveTheDefinedOrder) { expect_all<double, double>(); }
TEST_P(OwnBfloat16Products, HaveTheDefinedOrder) { expect_all<bfloat16, bfloat16>(); }
TEST_P(OwnBfloat16Products, InFloat32HaveTheDefinedOrder) { expect_all<bfloat16, float>(); }

TEST_P(OwnProducts, OfNf4HaveTheBitsOfItsNumbers) {
  expect_nf4<float, float>();
  expect_nf4<double, double>();
}
TEST_P(OwnBfloat16Products, OfNf4HaveTheBitsOfItsNumbers) {
  expect_nf4<bfloat16, bfloat16>();
  expect_nf4<bfloat16, float>();
}

TEST_P(OwnProducts, OfFp8HaveTheBitsOfItsNumbers) {
  expect_fp8<float, float>();
  expect_fp8<double, double>();
}
TEST_P(OwnBfloat16Products, OfFp8HaveTheBitsOfItsNumbers) {
  expect_fp8<bfloat16, bfloat16>();
  expect_fp8<bfloat16, float>();
}

const auto kName = [](const auto& info) { return std::string(info.param.name); };
// The levels that differ in float32, too.
std::vector<InstructionLevel> sets() {
  std::vector<InstructionLevel> all(std::begin(kInstructionLevels), std::end(kInstructionLevels));
  std::erase_if(all, [](const InstructionLevel& level) { return level.products != Bfloat16Products::converted; });
  return all;
}
INSTANTIATE_TEST_SUITE_P(Sets, OwnProducts, ::testing::ValuesIn(sets()), kName);
INSTANTIATE_TEST_SUITE_P(Levels, OwnBfloat16Products, ::testing::ValuesIn(kInstructionLevels), kName);

}  // namespace
}  // namespace espalier::own_products
