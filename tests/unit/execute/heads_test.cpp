// Heads by themselves, on drawn hidden rows: log-probs, entropies and values of every edge against plain formulas, and
// the gradients that they give back.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <cmath>

#include "espalier/execute/critic_head.h"
#include "espalier/execute/language_head.h"
#include "espalier/step/step.h"
#include "tests/unit/execute/small_step.h"

namespace espalier::testing {
namespace {

Case drawn_rollouts() {
  Case c = nested_trunks();
  c.family = "llama";  // the head is not the embedding
  c.rollouts.temperature_low = 0.5, c.rollouts.temperature_high = 1.5, c.rollouts.mask_gap = 0.3;
  c.rollouts.token_advantages = true;
  return c;
}

// Every item of a plan with hidden rows drawn for it, as a decoder would hand them over.
class HiddenRows {
 public:
  explicit HiddenRows(const Case& c) : step(c) {
    at::manual_seed(3);
    visit_items(step.plan.items, [&](const PlanItem& item) {
      inputs.push_back(std::make_unique<ItemInput>(item, step.rollouts, step.model->decoder.local(), false, nullptr,
                                                   moe::ChoiceRecord{}, step.model->decoder.device(),
                                                   mesh_of_one().cp));
      const at::Tensor normed_OM = at::randn({inputs.back()->model.outputs(), step.model->shape.hidden}, at::kDouble);
      work.push_back({item, *inputs.back(), normed_OM, at::full_like(normed_OM, NAN)});
    });
  }

  // Calls visit(work, edge, its hidden row) for every edge.
  void each_edge(const std::function<void(const HeadWork&, const LossEdge&, std::int32_t)>& visit) const {
    for (const HeadWork& one : work)
      for (std::size_t e = 0; e < one.input.edges.size(); ++e) visit(one, one.input.edges[e], one.input.output[e]);
  }

  SmallStep step;
  std::vector<std::unique_ptr<ItemInput>> inputs;
  std::vector<HeadWork> work;
};

std::int64_t count_numbers(const std::vector<std::vector<double>>& series) {
  std::int64_t count = 0;
  for (const std::vector<double>& one : series)
    count += std::ranges::count_if(one, [](double x) { return !std::isnan(x); });
  return count;
}

// The softmax of a row of logits over the kept set of an edge, or over the whole vocabulary; both 0 outside of the set.
struct Softmax {
  Softmax(const at::Tensor& z_V, const LossEdge& edge, std::span<const Rollout> rollouts)
      : log_p(at::zeros_like(z_V)), p(at::zeros_like(z_V)) {
    const auto kept = rollouts[edge.rollout].kept_sets.at(edge.position);
    std::vector<std::int64_t> ids(kept.begin(), kept.end());
    for (std::int64_t v = 0; kept.empty() && v < z_V.size(0); ++v) ids.push_back(v);
    const at::Tensor of_set = at::tensor(ids, at::kLong), over = z_V.index_select(0, of_set).log_softmax(0);
    log_p.index_copy_(0, of_set, over);
    p.index_copy_(0, of_set, over.exp());
  }
  at::Tensor log_p, p;
};

// log softmax(z / T)[target] and its row's entropy; both are sums of 50 terms of size 10, so 1e-12 is 1e3 roundings.
TEST(LanguageHeadInAStep, GivesLogprobsAndEntropiesOfEveryEdgeAndNothingElse) {
  HiddenRows rows(drawn_rollouts());
  LanguageHead head(rows.step.model->decoder, rows.step.rollouts, rows.step.arena);
  for (const HeadWork& work : rows.work) head.score(work);
  const at::Tensor head_VM = rows.step.model->decoder.weights().head_VM;
  std::int64_t edges = 0;
  rows.each_edge([&](const HeadWork& work, const LossEdge& edge, std::int32_t output) {
    const at::Tensor z_V = head_VM.mv(work.normed_OM[output]) / rows.step.rollouts[edge.rollout].temperature;
    const auto [log_p, p] = Softmax(z_V, edge, rows.step.rollouts);
    const RolloutSeries& series = head.series()[edge.rollout];
    EXPECT_NEAR(series.logprob[edge.position], log_p[edge.target].item<double>(), 1e-12);
    EXPECT_NEAR(series.entropy[edge.position], -(p * log_p).sum().item<double>(), 1e-12);
    ++edges;
  });
  std::vector<std::vector<double>> logprobs;
  for (const RolloutSeries& series : head.series()) logprobs.push_back(series.logprob);
  EXPECT_GT(edges, 0);
  EXPECT_EQ(count_numbers(logprobs), edges) << "tokens without an edge have none";
}

// A loss of whole rollouts takes its derivative in a second pass; one of tokens in the first. Where the objective is of
// tokens both ways give the same gradients, so that the second way is right, too.
TEST(LanguageHeadInAStep, TheGradientIsThatOfAutograd) {
  HiddenRows rows(drawn_rollouts());
  rows.step.c.options.entropy_coeff = 0.05;
  std::vector<std::vector<double>> advantages;
  for (const Rollout& rollout : rows.step.rollouts) advantages.push_back(rollout.advantages);
  for (const char* loss : {"reinforce", "gspo"}) {
    SCOPED_TRACE(loss);
    Options options = rows.step.c.options;
    options.policy_loss = loss;
    Objective objective(rows.step.rollouts, advantages, options);
    LanguageHead head(rows.step.model->decoder, rows.step.rollouts, rows.step.arena, &objective, &rows.step.gradients);
    rows.step.gradients.zero();
    for (const HeadWork& work : rows.work) {
      head.score(work);
      if (head.needs_whole_rollout()) head.finish_rollouts(work.item);
    }
    EXPECT_EQ(head.needs_whole_rollout(), loss == std::string("gspo"));
    if (head.needs_whole_rollout())
      for (const HeadWork& work : rows.work) head.add_backward(work);
    // dL/dlogit = dL/dlogprob (1[target] - p) / T + dL/dentropy (-p (log p + H)) / T, with the objective's own slopes.
    const at::Tensor head_VM = rows.step.model->decoder.weights().head_VM;
    at::Tensor expected_VM = at::zeros_like(head_VM);
    std::vector<at::Tensor> expected_OM;
    for (const HeadWork& work : rows.work) expected_OM.push_back(at::zeros_like(work.normed_OM));
    Objective again(rows.step.rollouts, advantages, options);
    std::vector<std::vector<double>> of_logprob, of_entropy;
    for (std::size_t r = 0; r < rows.step.rollouts.size(); ++r) {
      const RolloutSeries& series = head.series()[r];
      of_logprob.emplace_back(series.logprob.size()), of_entropy.emplace_back(series.logprob.size());
      if (head.needs_whole_rollout())
        again.add_rollout(static_cast<std::int32_t>(r), series.logprob, series.entropy, of_logprob[r], of_entropy[r]);
    }
    for (std::size_t i = 0; i < rows.work.size(); ++i) {
      const HeadWork& work = rows.work[i];
      for (std::size_t e = 0; e < work.input.edges.size(); ++e) {
        const LossEdge& edge = work.input.edges[e];
        const std::int32_t output = work.input.output[e];
        const RolloutSeries& series = head.series()[edge.rollout];
        double slope = of_logprob[edge.rollout][edge.position],
               slope_of_entropy = of_entropy[edge.rollout][edge.position];
        if (!head.needs_whole_rollout())
          again.add_edges({&edge, 1}, {&series.logprob[edge.position], 1}, {&series.entropy[edge.position], 1},
                          {&slope, 1}, {&slope_of_entropy, 1});
        const double temperature = rows.step.rollouts[edge.rollout].temperature;
        const auto [log_p, p] = Softmax(head_VM.mv(work.normed_OM[output]) / temperature, edge, rows.step.rollouts);
        at::Tensor of_logits = -slope * p - slope_of_entropy * p * (log_p + series.entropy[edge.position]);
        of_logits[edge.target] += slope;
        of_logits /= temperature;
        expected_VM += at::outer(of_logits, work.normed_OM[output]);
        expected_OM[i][output] += head_VM.t().mv(of_logits);
      }
      EXPECT_LE((work.grad_normed_OM - expected_OM[i]).norm().item<double>(),
                kFloat64 * std::max(1e-3, expected_OM[i].norm().item<double>()));
    }
    const at::Tensor found_VM = rows.step.gradients.views().head_VM;
    EXPECT_GT(expected_VM.norm().item<double>(), 0);
    EXPECT_LE((found_VM - expected_VM).norm().item<double>(), kFloat64 * expected_VM.norm().item<double>());
  }
}

// dL/dvalue of an edge is known; so the gradients are sums over edges.
class DrawnSlopes : public ValueSlopes {
 public:
  static double slope(const LossEdge& edge) { return std::sin(1.0 + 3 * edge.rollout + edge.position); }
  void add_edges(std::span<const LossEdge> edges, std::span<const double>, std::span<double> grad_value) override {
    for (std::size_t e = 0; e < edges.size(); ++e) grad_value[e] = slope(edges[e]);
  }
};

TEST(CriticHeadInAStep, GivesOneValueForARowAndSumsTheSlopesOfItsEdges) {
  Case c = drawn_rollouts();
  c.critic = c.rollouts.values = true;
  HiddenRows rows(c);
  DrawnSlopes slopes;
  rows.step.gradients.zero();
  CriticHead head(rows.step.model->decoder, rows.step.rollouts, &slopes, &rows.step.gradients);
  for (const HeadWork& work : rows.work) head.score(work);
  const ModelViews& weights = rows.step.model->decoder.weights();
  at::Tensor expected_M = at::zeros_like(weights.value_M);
  double expected_bias = 0;
  std::int64_t edges = 0;
  rows.each_edge([&](const HeadWork& work, const LossEdge& edge, std::int32_t output) {
    const double value = weights.value_M.view({-1}).dot(work.normed_OM[output]).item<double>() +
                         (weights.value_bias_1.defined() ? weights.value_bias_1.item<double>() : 0);
    EXPECT_NEAR(head.values()[edge.rollout][edge.position], value, 1e-13 * work.normed_OM.size(1));
    expected_M += DrawnSlopes::slope(edge) * work.normed_OM[output].view_as(expected_M);
    expected_bias += DrawnSlopes::slope(edge);
    ++edges;
  });
  EXPECT_EQ(count_numbers(head.values()), edges);
  const ModelViews& grads = rows.step.gradients.views();
  EXPECT_LE((grads.value_M - expected_M).norm().item<double>(), kFloat64 * expected_M.norm().item<double>());
  EXPECT_NEAR(grads.value_bias_1.item<double>(), expected_bias, kFloat64 * std::abs(expected_bias));
  for (const HeadWork& work : rows.work) {
    at::Tensor expected_O = at::zeros({work.input.model.outputs()}, at::kDouble);
    for (std::size_t e = 0; e < work.input.edges.size(); ++e)
      expected_O[work.input.output[e]] += DrawnSlopes::slope(work.input.edges[e]);
    const at::Tensor expected_OM = at::outer(expected_O, weights.value_M.view({-1}));
    EXPECT_TRUE(at::allclose(work.grad_normed_OM, expected_OM, kFloat64, kFloat64));
  }
}

}  // namespace
}  // namespace espalier::testing
