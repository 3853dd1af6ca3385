// AdamW and sampling on a CPU.
#include <span>

#include "espalier/ops/cpu/adamw_kernels.h"
#include "espalier/ops/cpu/dispatch.h"
#include "espalier/ops/cpu/operations.h"
#include "espalier/ops/cpu/token_choice.h"

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

void choose_tokens(const at::Tensor& logits_BV, const ChoiceRule& rule, const at::Tensor& begin_B1,
                   const at::Tensor& uniform_N, const at::Tensor& token_N, const at::Tensor& logprob_N) {
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
    }
  });
}

}  // namespace

OptimizerOperations optimizer_operations() { return {sum_of_squares, adamw}; }
ChoiceOperations choice_operations() { return {choose_tokens}; }

}  // namespace espalier::cpu
