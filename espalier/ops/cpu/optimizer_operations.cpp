// AdamW and sampling on a CPU.
#include <algorithm>
#include <span>

#include "espalier/ops/cpu/adamw_kernels.h"
#include "espalier/ops/cpu/operations.h"
#include "espalier/ops/cpu/token_choice.h"
#include "espalier/ops/dispatch.h"

namespace espalier::cpu {
namespace {

void sum_of_squares(const at::Tensor& x, const at::Tensor& sum_1) {
  dispatch_sums(x.scalar_type(),
                [&]<class A>() { *pointer<double>(sum_1) = espalier::sum_of_squares(x.numel(), pointer<A>(x)); });
}

void adamw(const at::Tensor& p, const at::Tensor& grad, const at::Tensor& m, const at::Tensor& v, const AdamWStep& step,
           const at::Tensor& rounded) {
  dispatch_sums(p.scalar_type(), [&]<class A>() {
    espalier::adamw(p.numel(), pointer<A>(p), pointer<A>(grad), pointer<A>(m), pointer<A>(v), step,
                    pointer<bfloat16>(rounded));
  });
}

// `kept` as choose_token leaves it: empty if all tokens may be drawn.
void write_kept(std::span<const std::int32_t> kept, std::int64_t vocabulary, std::int32_t* words) {
  std::fill_n(words, (vocabulary + 31) / 32, 0);
  const auto set = [&](std::int64_t id) {
    words[id / 32] = static_cast<std::int32_t>(static_cast<std::uint32_t>(words[id / 32]) | 1u << (id % 32));
  };
  for (const std::int32_t id : kept) set(id);
  for (std::int64_t id = 0; kept.empty() && id < vocabulary; ++id) set(id);
}

void choose_tokens(const at::Tensor& logits_BV, const ChoiceRule& rule, const at::Tensor& begin_B1,
                   const at::Tensor& uniform_N, const at::Tensor& token_N, const at::Tensor& logprob_N,
                   const at::Tensor& kept_BW) {
  const std::int64_t rows = logits_BV.size(0), vocabulary = logits_BV.size(1);
  const auto* const begin = pointer<std::int32_t>(begin_B1);
  const double* const uniform = pointer<double>(uniform_N);
  dispatch_sums(logits_BV.scalar_type(), [&]<class A>() {
    const A* const logits = pointer<A>(logits_BV);
#pragma omp parallel for schedule(dynamic, 1) if (rows * vocabulary >= kParallelLogits)
    for (std::int64_t row = 0; row < rows; ++row) {
      static thread_local ChoiceScratch scratch;
      const std::span<const A> raw(logits + row * vocabulary, static_cast<std::size_t>(vocabulary));
      const HeadRowSums sums = compute_row_sums(raw.data(), vocabulary, rule.inverse_temperature());
      for (std::int32_t n = begin[row] - begin[0]; n < begin[row + 1] - begin[0]; ++n) {
        const TokenChoice choice = choose_token(raw, sums, rule, uniform[n], scratch);
        pointer<double>(token_N)[n] = choice.token;
        pointer<double>(logprob_N)[n] = choice.logprob;
      }
      if (kept_BW.defined() && rule.temperature > 0 && begin[row] < begin[row + 1])
        write_kept(scratch.kept, vocabulary, pointer<std::int32_t>(kept_BW) + row * kept_BW.size(1));
    }
  });
}

}  // namespace

OptimizerOperations optimizer_operations() { return {sum_of_squares, adamw}; }
ChoiceOperations choice_operations() { return {choose_tokens}; }

}  // namespace espalier::cpu
