#include "espalier/doctor/probe.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/topk.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "espalier/device/host_values.h"
#include "espalier/execute/head.h"
#include "espalier/objective/fused_head.h"
#include "espalier/state/held_models.h"
#include "espalier/state/planning.h"
#include "espalier/step/pass.h"
#include "espalier/step/workspace.h"

namespace espalier {
namespace {

class ProbeHead final : public Head {
 public:
  ProbeHead(const Decoder& decoder, std::span<const Rollout> rollouts, const ProbeWish& wish, Arena& arena)
      : decoder_(decoder), rollouts_(rollouts), wish_(wish), arena_(arena) {
    for (const Rollout& rollout : rollouts) probe_.emplace_back(rollout.response_ids.size());
  }

  void score(const HeadWork& work) override {
    if (work.input.edges.empty()) return;
    const VocabularyPart part{decoder_.local().vocabulary().begin, decoder_.shape().vocabulary, decoder_.mesh().tp,
                              decoder_.logits(), decoder_.weights().head_low_rank};
    for_each_logits(
        work.normed_OM, decoder_.weights().head_VM, part,
        [&](std::int64_t first, const at::Tensor& logits_BV) { take_block(work.input, first, logits_BV); }, arena_);
  }

  Probe& result() { return probe_; }

 private:
  static std::vector<double> on_host(const at::Tensor& values) {
    const at::Tensor host = values.to(at::kCPU, at::kDouble).contiguous();
    const auto numbers = host_values<const double>(host);
    return {numbers.begin(), numbers.end()};
  }

  // Edges are ordered by output row.
  static std::size_t first_edge(const ItemInput& input, std::int64_t row) {
    return static_cast<std::size_t>(std::ranges::lower_bound(input.output, row) - input.output.begin());
  }

  void take_block(const ItemInput& input, std::int64_t first, const at::Tensor& logits_BV) {
    const std::int64_t rows = logits_BV.size(0);
    std::vector<double> temperatures;
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::size_t edge = first_edge(input, first + row);
      const bool has_edges = edge < first_edge(input, first + row + 1);
      temperatures.push_back(has_edges ? rollout_of(input.edges[edge]).temperature : 1.0);
    }
    const at::Tensor temperature_B1 = at::tensor(temperatures, at::kDouble).to(logits_BV.options()).unsqueeze(1);
    const at::Tensor scaled_BV = logits_BV / temperature_B1;
    const std::vector<double> sum = on_host(at::logsumexp(scaled_BV, 1)), plain = on_host(at::logsumexp(logits_BV, 1)),
                              greatest = on_host(at::amax(scaled_BV, 1));
    std::vector<double> top;
    const std::int64_t width = std::min(wish_.top, logits_BV.size(1));
    if (width > 0) top = on_host(std::get<0>(at::topk(scaled_BV, width, 1)));
    std::vector<std::vector<double>> others;
    for (const double temperature : wish_.temperatures)
      others.push_back(on_host(at::logsumexp(logits_BV / temperature, 1)));

    for (std::int64_t row = 0; row < rows; ++row) {
      const auto r = static_cast<std::size_t>(row);
      const std::size_t edge_begin = first_edge(input, first + row), edge_end = first_edge(input, first + row + 1);
      if (edge_begin == edge_end) continue;
      std::vector<std::int64_t> targets;
      for (std::size_t e = edge_begin; e < edge_end; ++e) targets.push_back(input.edges[e].target);
      const at::Tensor raw_V = logits_BV.select(0, row);
      const std::vector<double> raw = on_host(raw_V.index_select(0, indices(targets, raw_V)));
      for (std::size_t e = edge_begin; e < edge_end; ++e) {
        const LossEdge& edge = input.edges[e];
        const double logit = raw[e - edge_begin], temperature = temperatures[r];
        TokenProbe& token = probe_[static_cast<std::size_t>(edge.rollout)][static_cast<std::size_t>(edge.position)];
        token.full_logprob = logit / temperature - sum[r];
        token.logprob = token.full_logprob;
        token.unscaled = logit - plain[r];
        token.greatest = greatest[r] - sum[r];
        const std::span<const std::int32_t> kept =
            rollout_of(edge).kept_sets.at(static_cast<std::size_t>(edge.position));
        if (!kept.empty()) {
          const std::vector<std::int64_t> members(kept.begin(), kept.end());
          const at::Tensor of_set = raw_V.index_select(0, indices(members, raw_V)) / temperature;
          token.logprob = logit / temperature - on_host(at::logsumexp(of_set, 0)).front();
        }
        for (std::int64_t k = 0; k < width; ++k)
          token.top.push_back(
              static_cast<float>(top[r * static_cast<std::size_t>(width) + static_cast<std::size_t>(k)] - sum[r]));
        for (std::size_t g = 0; g < others.size(); ++g)
          token.at.push_back(static_cast<float>(logit / wish_.temperatures[g] - others[g][r]));
      }
    }
  }

  const Rollout& rollout_of(const LossEdge& edge) const { return rollouts_[static_cast<std::size_t>(edge.rollout)]; }
  static at::Tensor indices(const std::vector<std::int64_t>& values, const at::Tensor& like) {
    return at::tensor(values, at::kLong).to(like.device());
  }

  const Decoder& decoder_;
  std::span<const Rollout> rollouts_;
  const ProbeWish& wish_;
  Arena& arena_;
  Probe probe_;
};

}  // namespace

Probe probe(const ModelState& model, std::span<const Rollout> rollouts, const ProbeWish& wish, const Options& options,
            const MachineProfile& machine, Progress& progress) {
  Workspace workspace(budget_of(options).beside_held());
  const HeldBytes weights(workspace, HeldModel{model.decoder.local()}.bytes(model.dtype));
  ProbeHead head(model.decoder, rollouts, wish, workspace.arena);
  run_forward_pass({.decoder = model.decoder,
                    .rollouts = rollouts,
                    .options = options,
                    .machine = machine,
                    .workspace = workspace,
                    .progress = progress,
                    .task = "replaying"},
                   head);
  return std::move(head.result());
}

}  // namespace espalier
