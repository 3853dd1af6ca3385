// Blocks of logits, a critic's values, AdamW and sampling on a GPU.
#include "espalier/ops/cuda/choice.h"
#include "espalier/ops/cuda/columns.h"
#include "espalier/ops/cuda/head.h"
#include "espalier/ops/cuda/operations.h"
#include "espalier/ops/cuda/optimizer.h"
#include "espalier/ops/dispatch.h"

namespace espalier::cuda {
namespace {

Edges edges_of(const EdgeBlock& block) {
  return {pointer<double>(block.temperature_D), pointer<std::int32_t>(block.begin_D1),
          pointer<std::int32_t>(block.target_E), block.target_E.size(0)};
}
Sets sets_of(const KeptBlock& kept) {
  return {kept.row_D.size(0),
          pointer<std::int32_t>(kept.row_D),
          pointer<std::int32_t>(kept.begin_D),
          pointer<std::int32_t>(kept.end_D),
          pointer<std::int32_t>(kept.column_Z),
          pointer<std::int32_t>(kept.first_B1)};
}
RowSums sums_of(const LogitSums& sums) {
  return {pointer<double>(sums.max_D), pointer<double>(sums.sum_exp_D), pointer<double>(sums.weighted_D)};
}

void sum_logits(const EdgeBlock& edges, std::int64_t first, const at::Tensor& logits_BV, const LogitSums& sums,
                const at::Tensor& raw_E) {
  dispatch_sums(logits_BV.scalar_type(), [&]<class L>() {
    if (edges.kept.defined())
      logit_sums<L>(sets_of(edges.kept), logits_BV.size(1), edges_of(edges), first, pointer<L>(logits_BV),
                    sums_of(sums), pointer<double>(raw_E));
    else
      logit_sums<L>(logits_BV.size(0), logits_BV.size(1), edges_of(edges), first, pointer<L>(logits_BV), sums_of(sums),
                    pointer<double>(raw_E));
  });
}

void raise(const EdgeBlock& edges, const at::Tensor& max_D, const LogitSums& sums) {
  raise_maximum(max_D.size(0), edges_of(edges), pointer<double>(max_D), sums_of(sums));
}

void score(const EdgeBlock& edges, const at::Tensor& raw_E, const LogitSums& sums, const at::Tensor& logprob_E,
           const at::Tensor& entropy_E) {
  score_edges(sums.max_D.size(0), edges_of(edges), pointer<double>(raw_E), sums_of(sums), pointer<double>(logprob_E),
              pointer<double>(entropy_E));
}

void write_gradients(const EdgeBlock& edges, std::int64_t first, const LogitSums& sums,
                     const at::Tensor& grad_logprob_E, const at::Tensor& grad_entropy_E, const at::Tensor& logits_BV) {
  dispatch_sums(logits_BV.scalar_type(), [&]<class L>() {
    const auto scale = static_cast<L>(edges.shape.scale), cap = static_cast<L>(edges.shape.cap);
    const double *by_logprob = pointer<double>(grad_logprob_E), *by_entropy = pointer<double>(grad_entropy_E);
    if (edges.kept.defined())
      logit_gradients<L>(logits_BV.size(0), sets_of(edges.kept), logits_BV.size(1), edges_of(edges), first,
                         sums_of(sums), by_logprob, by_entropy, scale, cap, pointer<L>(logits_BV));
    else
      logit_gradients<L>(logits_BV.size(0), logits_BV.size(1), edges_of(edges), first, sums_of(sums), by_logprob,
                         by_entropy, scale, cap, pointer<L>(logits_BV));
  });
}

void compute_value(const at::Tensor& hidden_OM, const at::Tensor& weight_M, const at::Tensor& bias_1,
                   const at::Tensor& value_O) {
  dispatch(hidden_OM.scalar_type(), [&]<class T>() {
    value<T>(hidden_OM.size(0), hidden_OM.size(1), pointer<T>(hidden_OM), pointer<T>(weight_M), pointer<T>(bias_1),
             pointer<double>(value_O));
  });
}

void add_value_backward(const at::Tensor& hidden_OM, const at::Tensor& weight_M, const at::Tensor& grad_value_O,
                        const at::Tensor& grad_hidden_OM, const at::Tensor& grad_weight_M,
                        const at::Tensor& grad_bias_1) {
  const std::int64_t rows = hidden_OM.size(0), width = hidden_OM.size(1);
  const double* const grad_value = pointer<double>(grad_value_O);
  dispatch(hidden_OM.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    value_grad_hidden<T>(rows, width, grad_value, pointer<T>(weight_M), pointer<T>(grad_hidden_OM));
    add_column_sums<double>(rows, width, pointer<T>(hidden_OM), width, grad_value, pointer<A>(grad_weight_M));
    add_sum(rows, grad_value, pointer<A>(grad_bias_1));
  });
}

void sum_squares(const at::Tensor& x, const at::Tensor& sum_1) {
  dispatch_sums(x.scalar_type(),
                [&]<class P>() { sum_of_squares<P>(x.numel(), pointer<P>(x), pointer<double>(sum_1)); });
}

void update(const at::Tensor& p, const at::Tensor& grad, const at::Tensor& m, const at::Tensor& v,
            const AdamWStep& step, const at::Tensor& rounded) {
  dispatch_sums(p.scalar_type(), [&]<class P>() {
    adamw<P>(p.numel(), pointer<P>(p), pointer<P>(grad), pointer<P>(m), pointer<P>(v), step,
             pointer<bfloat16>(rounded));
  });
}

void choose(const at::Tensor& logits_BV, const ChoiceRule& rule, const at::Tensor& begin_B1,
            const at::Tensor& uniform_N, const at::Tensor& token_N, const at::Tensor& logprob_N,
            const at::Tensor& kept_BW) {
  dispatch_sums(logits_BV.scalar_type(), [&]<class L>() {
    choose_tokens<L>(logits_BV.size(0), logits_BV.size(1), pointer<L>(logits_BV), rule, pointer<std::int32_t>(begin_B1),
                     pointer<double>(uniform_N), pointer<double>(token_N), pointer<double>(logprob_N),
                     kept_BW.defined() ? pointer<std::int32_t>(kept_BW) : nullptr);
  });
}

void shape(const LogitShape& shape, const at::Tensor& logits_BV) {
  dispatch_sums(logits_BV.scalar_type(), [&]<class L>() {
    shape_logits<L>(logits_BV.size(0), logits_BV.size(1), logits_BV.stride(0), static_cast<L>(shape.scale),
                    static_cast<L>(shape.cap), pointer<L>(logits_BV));
  });
}

}  // namespace

HeadOperations head_operations() {
  return {shape, sum_logits, raise, score, write_gradients, compute_value, add_value_backward};
}
OptimizerOperations optimizer_operations() { return {sum_squares, update}; }
ChoiceOperations choice_operations() { return {choose}; }

}  // namespace espalier::cuda
