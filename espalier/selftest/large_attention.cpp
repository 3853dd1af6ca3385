#include "espalier/selftest/large_attention.h"

#include <ATen/TensorIndexing.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/concat.h>
#include <ATen/ops/dot.h>
#include <ATen/ops/mv.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "espalier/base/error.h"

namespace espalier {
namespace {

constexpr std::int64_t kFewestRows = 128, kMostRows = 16384, kBranches = 8, kSamples = 32;
constexpr std::int64_t kHeads = 2, kHeadDim = 128;  // two heads of queries share one of keys
constexpr double kQuick = 0.02;                     // seconds of a forward

// On the host, rounded to bfloat16; [R, width].
at::Tensor rows_of(std::int64_t R, std::int64_t width, std::uint64_t seed) {
  return normal({R, width}, seed).to(at::kBFloat16);
}

// A stem of one eighth of the rows, then branches below it, one after the other.
std::vector<std::int32_t> branch_ends(std::int64_t R) {
  std::vector<std::int32_t> end(static_cast<std::size_t>(R), static_cast<std::int32_t>(R));
  const std::int64_t stem = R / kBranches, length = stem;
  for (std::int64_t i = stem; i < R; ++i)
    end[static_cast<std::size_t>(i)] =
        static_cast<std::int32_t>(std::min(R, stem + ((i - stem) / length + 1) * length));
  return end;
}

struct Problem {
  std::int64_t R;
  at::Tensor q, own_k, own_v, path_k, path_v, grad_out, ends;  // on the host

  explicit Problem(std::int64_t rows)
      : R(rows),
        q(rows_of(rows, kHeads * kHeadDim, 60)),
        own_k(rows_of(rows, kHeadDim, 61)),
        own_v(rows_of(rows, kHeadDim, 62)),
        path_k(rows_of(rows, kHeadDim, 63)),
        path_v(rows_of(rows, kHeadDim, 64)),
        grad_out(rows_of(rows, kHeads * kHeadDim, 65)),
        ends(whole_numbers(branch_ends(rows))) {}
};

struct Results {
  at::Tensor out, lse, dq, own_dk, own_dv, path_dk, path_dv;
  double forward_seconds = 0;
};

Results run(Device& device, const Problem& p) {
  const auto given = [&](const at::Tensor& x) { return device.adopt(x.clone()); };
  const auto sums = [&] { return device.adopt(at::zeros({p.R, kHeadDim}, at::kFloat)); };
  const AttentionProblem problem{kHeadDim,        given(p.q),      given(p.own_k), given(p.own_v),
                                 given(p.path_k), given(p.path_v), at::Tensor(),   given(p.ends)};
  const at::Tensor out = given(p.q), lse = device.adopt(at::zeros({kHeads, p.R}, at::kFloat)), dq = given(p.q);
  const AttentionGradients grads{dq, sums(), sums(), sums(), sums()};
  device.synchronize();
  const double start = device.seconds();
  device.operations().attention(problem, out, lse);
  device.synchronize();
  const double seconds = device.seconds() - start;
  device.operations().add_attention_backward(problem, out, lse, given(p.grad_out), grads);
  const auto told = [&](const at::Tensor& x) { return device.to_host(x).to(at::kDouble); };
  return {told(out),
          told(lse),
          told(dq),
          told(grads.own_k_T),
          told(grads.own_v_T),
          told(grads.path_k_P),
          told(grads.path_v_P),
          seconds};
}

// Adds the difference of two vectors to sums of squares.
struct Distance {
  double difference = 0, exact = 0;

  void add(const at::Tensor& got, const at::Tensor& want) {
    difference += (got - want).square().sum().item<double>();
    exact += want.square().sum().item<double>();
  }
  double value() const { return std::sqrt(difference / exact); }
};

class Samples {
 public:
  Samples(const Problem& problem, const Results& results)
      : p_(problem),
        got_(results),
        k_(at::concat({p_.path_k, p_.own_k}).to(at::kDouble)),
        v_(at::concat({p_.path_v, p_.own_v}).to(at::kDouble)),
        row_(at::arange(p_.R)) {
    for (std::int64_t i = 0; i < kSamples; ++i) {
      const std::int64_t row = i * (p_.R - 1) / (kSamples - 1);
      for (std::int64_t head = 0; head < kHeads; ++head) add_query(head, row);
      add_key(row, got_.path_dk, got_.path_dv, false);
      add_key(row, got_.own_dk, got_.own_dv, true);
    }
  }

  Distance out, lse, dq, dk, dv;

 private:
  at::Tensor of_head(const at::Tensor& rows, std::int64_t head) const {
    return rows.slice(-1, head * kHeadDim, (head + 1) * kHeadDim).to(at::kDouble);
  }

  // out = sum_j p_j v_j,  p = softmax(scale q . k),  dq = scale sum_j p_j (dO . v_j - dO . out) k_j
  void add_query(std::int64_t head, std::int64_t row) {
    const at::Tensor seen = at::concat({at::ones({p_.R}, at::kBool), row_.le(row).logical_and(p_.ends.gt(row))});
    const at::Tensor k = k_.index({seen}), v = v_.index({seen});
    const at::Tensor scores = at::mv(k, of_head(p_.q[row], head)) * scale_, weights = scores.softmax(0);
    const at::Tensor result = at::mv(v.t(), weights), go = of_head(p_.grad_out[row], head);
    const at::Tensor slopes = weights * (at::mv(v, go) - at::dot(go, result));
    out.add(of_head(got_.out[row], head), result);
    lse.add(got_.lse[head][row], scores.logsumexp(0));
    dq.add(of_head(got_.dq[row], head), at::mv(k.t(), slopes) * scale_);
  }

  // dv = sum_i p_i dO_i,  dk = scale sum_i p_i (dO_i . v - dO_i . out_i) q_i,  over all queries i that see the key
  void add_key(std::int64_t row, const at::Tensor& got_dk, const at::Tensor& got_dv, bool own) {
    const at::Tensor seen =
        own ? row_.ge(row).logical_and(row_.lt(p_.ends[row].item<std::int32_t>())) : at::ones({p_.R}, at::kBool);
    const std::int64_t at_row = own ? p_.R + row : row;
    at::Tensor exact_dk = at::zeros({kHeadDim}, at::kDouble), exact_dv = exact_dk.clone();
    for (std::int64_t head = 0; head < kHeads; ++head) {
      const at::Tensor q = of_head(p_.q, head).index({seen}), go = of_head(p_.grad_out, head).index({seen});
      const at::Tensor weights = (at::mv(q, k_[at_row]) * scale_ - got_.lse[head].index({seen})).exp();
      const at::Tensor delta = (go * of_head(got_.out, head).index({seen})).sum(1);
      exact_dv += at::mv(go.t(), weights);
      exact_dk += at::mv(q.t(), weights * (at::mv(go, v_[at_row]) - delta)) * scale_;
    }
    dk.add(got_dk[row], exact_dk);
    dv.add(got_dv[row], exact_dv);
  }

  const Problem& p_;
  const Results& got_;
  const at::Tensor k_, v_, row_;
  const double scale_ = 1 / std::sqrt(static_cast<double>(kHeadDim));
};

}  // namespace

std::vector<OperationCheck> check_large_attention(Device& device) {
  std::int64_t R = kFewestRows;
  std::optional<Problem> problem(R);
  Results results = run(device, *problem);
  while (results.forward_seconds < kQuick && R < kMostRows) {
    R *= 2;
    results = run(device, problem.emplace(R));
  }
  const Results again = run(device, *problem);
  const Samples samples(*problem, results);
  const std::string sizes = text_of(R, " rows over a path of ", R, ", sampled");
  const double bfloat16 = 0x1p-8, additions = static_cast<double>(2 * R + kHeadDim + 8) * 0x1p-24;
  const auto check = [&](const char* name, const Distance& distance, double allowed, const at::Tensor& first,
                         const at::Tensor& second) {
    return OperationCheck{name, sizes, DType::bfloat16, distance.value(), allowed, first.equal(second)};
  };
  return {check("attention", samples.out, 2 * bfloat16, results.out, again.out),
          check("attention, lse", samples.lse, additions, results.lse, again.lse),
          check("add_attention_backward, dq", samples.dq, 4 * bfloat16, results.dq, again.dq),
          check("add_attention_backward, dk", samples.dk, 4 * bfloat16, results.path_dk, again.path_dk),
          check("add_attention_backward, dv", samples.dv, 4 * bfloat16, results.own_dv, again.own_dv)};
}

}  // namespace espalier
