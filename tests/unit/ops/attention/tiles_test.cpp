// The machine code of the kernels for AMX, to the bit against their emulation, on a processor without AMX.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "espalier/base/instruction_set.h"
#include "espalier/ops/cpu/attention/kernels.h"
#include "tests/unit/ops/attention/amx_by_signal.h"

namespace espalier {
namespace avx512_tiles {
template <class T>
void add_forward(attention::cpu::Kernels<T>& kernels);
template <class T>
void add_backward(attention::cpu::Kernels<T>& kernels);
}  // namespace avx512_tiles
namespace avx512_emulated_tiles {
template <class T>
void add_forward(attention::cpu::Kernels<T>& kernels);
template <class T>
void add_backward(attention::cpu::Kernels<T>& kernels);
}  // namespace avx512_emulated_tiles

namespace {

using attention::cpu::Kernels;

struct Case {
  std::int64_t path, own, heads, kv_heads, head_dim;
  int threads;
};

std::vector<bfloat16> random_numbers(std::int64_t count, std::mt19937& source) {
  std::normal_distribution<float> normal;
  std::vector<bfloat16> out(static_cast<std::size_t>(count));
  for (bfloat16& x : out) x = bfloat16(normal(source));
  return out;
}

// All that forward and backward write, as bits.
std::vector<std::uint32_t> results(const Kernels<bfloat16>& kernels, const Case& c) {
  std::mt19937 source(7);
  const std::int64_t wide = c.heads * c.head_dim, narrow = c.kv_heads * c.head_dim;
  const auto q = random_numbers(c.own * wide, source), grad = random_numbers(c.own * wide, source);
  const auto k = random_numbers(c.own * narrow, source), v = random_numbers(c.own * narrow, source);
  const auto pk = random_numbers(c.path * narrow, source), pv = random_numbers(c.path * narrow, source);
  // Three responses of uneven length.
  std::vector<std::int32_t> ends(static_cast<std::size_t>(c.own));
  for (std::int64_t j = 0; j < c.own; ++j)
    ends[static_cast<std::size_t>(j)] = static_cast<std::int32_t>(j < c.own / 2       ? c.own / 2
                                                                  : j < c.own * 3 / 4 ? c.own * 3 / 4
                                                                                      : c.own);
  const attention::Shape shape{
      c.own,   c.own,      c.path, c.heads, c.kv_heads, c.head_dim, 1 / std::sqrt(static_cast<double>(c.head_dim)),
      nullptr, ends.data()};
  const auto rows = [](const std::vector<bfloat16>& x, std::int64_t stride) {
    return attention::Rows<const bfloat16>{x.data(), stride};
  };
  const attention::Inputs<bfloat16> in{rows(q, wide), rows(k, narrow), rows(v, narrow), rows(pk, narrow),
                                       rows(pv, narrow)};
  std::vector<bfloat16> out(q.size()), grad_q(q.size());
  std::vector<float> lse(static_cast<std::size_t>(c.heads * c.own));
  std::vector<std::vector<float>> sums;
  for (const std::size_t size : {k.size(), v.size(), pk.size(), pv.size()}) sums.emplace_back(size, 0.0f);
  const auto memory_of = [](std::size_t bytes) {
    const std::size_t unit = attention::cpu::kScratchAlignment, whole = (bytes + unit - 1) / unit * unit;
    return std::unique_ptr<void, decltype(&std::free)>(std::aligned_alloc(unit, whole), &std::free);
  };
  const auto forward_memory = memory_of(kernels.forward_scratch(shape, c.threads));
  kernels.forward(shape, in, {out.data(), wide}, lse.data(), forward_memory.get(), c.threads);
  const auto backward_memory = memory_of(kernels.backward_scratch(shape, c.threads));
  kernels.add_backward(shape, in, rows(out, wide), lse.data(), rows(grad, wide),
                       {{grad_q.data(), wide},
                        {sums[0].data(), narrow},
                        {sums[1].data(), narrow},
                        {sums[2].data(), narrow},
                        {sums[3].data(), narrow}},
                       backward_memory.get(), c.threads);
  std::vector<std::uint32_t> bits;
  for (const auto* values : {&out, &grad_q})
    for (const bfloat16 x : *values) bits.push_back(std::bit_cast<std::uint32_t>(static_cast<float>(x)));
  sums.push_back(lse);
  for (const auto& values : sums)
    for (const float x : values) bits.push_back(std::bit_cast<std::uint32_t>(x));
  return bits;
}

TEST(TileInstructions, DoWhatTheirEmulationDoes) {
  if (!processor_has(Bfloat16Products::emulated_tiles)) GTEST_SKIP() << "this processor has no AVX512_BF16";
  if (processor_has(Bfloat16Products::tiles)) GTEST_SKIP() << "this processor has AMX: attention_test runs it";
  Kernels<bfloat16> tiles{}, emulated{};
  avx512_tiles::add_forward(tiles), avx512_tiles::add_backward(tiles);
  avx512_emulated_tiles::add_forward(emulated), avx512_emulated_tiles::add_backward(emulated);
  const testing::AmxBySignal amx;
  for (const Case& c : {Case{150, 70, 4, 2, 64, 1}, Case{33, 40, 4, 1, 80, 2}, Case{0, 61, 2, 2, 36, 1}}) {
    SCOPED_TRACE(::testing::Message() << c.path << " + " << c.own << " rows, head size " << c.head_dim);
    const long before = testing::AmxBySignal::instructions();
    EXPECT_EQ(results(tiles, c), results(emulated, c));
    EXPECT_GT(testing::AmxBySignal::instructions(), before + 1000);
  }
}

}  // namespace
}  // namespace espalier
