#include "espalier/plan/communication.h"

#include <cmath>

#include "espalier/plan/parameter_shapes.h"
#include "espalier/plan/row_shares.h"

namespace espalier {
namespace {

constexpr std::int64_t kNumber = 8;                             // bytes of a double
constexpr double kLinkLatency = 5e-6, kNetworkLatency = 15e-6;  // seconds of one message; round

enum class Collective { sum, gather, scatter_sum, exchange, send };

// Ranks that share an axis, and the link between those that are farthest apart.
struct Line {
  std::int64_t ranks = 1;
  double bytes_per_second = 1, latency = 0;

  // Of rings: every rank sends and receives at the link's rate.
  double seconds(Collective kind, double bytes) const {
    const double n = static_cast<double>(ranks), steps = std::ceil(std::log2(n)) * latency;
    switch (kind) {
      case Collective::sum:
        return 2 * (n - 1) / n * bytes / bytes_per_second + 2 * steps;
      case Collective::gather:
        return (n - 1) * bytes / bytes_per_second + steps;
      case Collective::scatter_sum:
        return (n - 1) / n * bytes / bytes_per_second + steps;
      case Collective::exchange:
      case Collective::send:
        return bytes / bytes_per_second + latency;
    }
    return 0;
  }
};

// Ranks whose numbers lie within `span` of each other.
Line line_of(std::int64_t ranks, std::int64_t span, const MachineProfile& profile) {
  const bool near = span <= profile.ranks_per_machine;
  return {ranks, near ? profile.link_bytes_per_second : profile.network_bytes_per_second,
          near ? kLinkLatency : kNetworkLatency};
}

}  // namespace

class Communication::Walk {
 public:
  Walk(const Communication& of, std::span<const Rollout> rollouts, bool all_logprobs)
      : local_(of.local_),
        own_(of.local_.own()),
        b_(of.bytes_.activation),
        s_(of.bytes_.accumulator),
        kind_(of.kind_),
        rollouts_(rollouts),
        all_logprobs_(all_logprobs) {
    const Degrees& d = local_.degrees();
    tp_ = line_of(d.tp, d.tp, of.profile_);
    cp_ = line_of(d.cp, d.tp * d.cp, of.profile_);
    pp_ = line_of(d.pp, d.tp * d.cp * d.pp, of.profile_);
    const std::int64_t stage = d.tp * d.cp;
    ep_ = line_of(d.ep, d.ep <= stage ? d.ep : stage * d.pp * (d.ep / stage), of.profile_);
    replicas_ = line_of(d.dp * d.cp, d.ranks(), of.profile_);
    expert_replicas_ = line_of(d.dp * d.cp * d.tp / d.ep, d.ranks(), of.profile_);
    last_stage_ = local_.place().pp == d.pp - 1;
  }

  void add(const PlanItem& item) {
    if (!runs_on(item, local_.place().cp)) return;  // a wave that was dealt to another rank of cp
    const bool trunk = item.kind == ItemKind::trunk;
    forward(item, trunk ? traffic.bytes.a : traffic.bytes.b);
    for (const PlanItem& below : item.below) add(below);
    if (kind_.gradients) backward(item, trunk ? traffic.bytes.c : traffic.bytes.b);
  }

  // Gradients of copies within tp, then of replicas, in the order of the engine.
  void add_reduction() {
    const double before = traffic.seconds;
    std::int64_t everybody = 0, experts = 0;
    for_each_parameter(local_.whole(), [&](const ParameterShape& parameter) {
      const auto shard = local_.shard(parameter);
      if (!shard) return;
      std::int64_t count = 1;
      for (std::size_t dim = 0; dim < parameter.sides.size(); ++dim)
        count *= static_cast<int>(dim) == shard->dim ? shard->local : parameter.sides[dim].size;
      (shard->of_expert && local_.degrees().ep > 1 ? experts : everybody) += count;
      if (shard->partial_gradient)
        give(tp_, Collective::sum, tp_.ranks / shard->copies * count * s_, traffic.bytes.reduction.tp);
    });
    give(replicas_, Collective::sum, everybody * s_, traffic.bytes.reduction.dp);
    give(expert_replicas_, Collective::sum, experts * s_, traffic.bytes.reduction.dp);
    traffic.reduction_seconds = traffic.seconds - before;
  }

  PlannedTraffic traffic;

 private:
  void give(const Line& line, Collective kind, std::int64_t bytes, std::int64_t& counter) {
    if (line.ranks == 1 || bytes == 0) return;
    counter += bytes;
    traffic.seconds += line.seconds(kind, static_cast<double>(bytes));
  }

  // Calls visit(rows that continue, whether the layer has experts) for every layer of this rank, R where it has some.
  template <class Visit>
  void for_each_layer(const PlanItem& item, Visit visit) const {
    for (std::int64_t layer = 0; layer < own_.layers; ++layer) {
      const bool experts = own_.has_experts(layer), last = last_stage_ && layer + 1 == own_.layers;
      visit(share(item, last && !(kind_.all_rows_choose && experts) ? item.set.outputs : item.set.rows), experts);
    }
  }
  // Of rows or edges of an item, those of the rank of cp with most.
  std::int64_t share(const PlanItem& item, std::int64_t count) const {
    return is_divided(item, cp_.ranks) ? RowShares(count, cp_.ranks).most() : count;
  }
  std::int64_t edges(const PlanItem& item) const {
    return static_cast<std::int64_t>(edges_of(item.set, rollouts_, all_logprobs_).size());
  }
  // Of a layer of a divided item.
  void gather_context(const PlanItem& item, AxisBytes& phase) {
    if (!is_divided(item, cp_.ranks)) return;
    give(cp_, Collective::gather, share(item, item.set.rows) * key_value_width() * b_, phase.cp);
  }
  void control(const PlanItem& item, AxisBytes& phase) {
    if (!is_divided(item, cp_.ranks)) return;
    if (kind_.whole_rollout && last_stage_) give(cp_, Collective::sum, 2 * edges(item) * kNumber, phase.cp);
    const ModelShape& whole = local_.whole();
    if (kind_.counts_rollouts && kind_.gradients)
      give(cp_, Collective::sum,
           static_cast<std::int64_t>(item.set.rollouts.size()) * whole.layers * whole.experts * kNumber, phase.cp);
  }

  void forward(const PlanItem& item, AxisBytes& phase) {
    const std::int64_t T = share(item, item.set.rows), M = own_.hidden;
    if (local_.place().pp == 0) give(tp_, Collective::sum, T * M * b_, phase.tp);
    for_each_layer(item, [&](std::int64_t R, bool experts) {
      gather_context(item, phase);
      give(tp_, Collective::sum, R * M * b_, phase.tp);
      give(tp_, Collective::sum, R * M * (experts ? s_ : b_), phase.tp);
      if (experts) exchange(R, M * b_, M * b_, phase);
    });
    control(item, phase);
    if (!last_stage_) return give(pp_, Collective::send, T * M * b_, phase.pp);
    head(item, phase, kind_.gradients && !kind_.whole_rollout);
  }

  void backward(const PlanItem& item, AxisBytes& phase) {
    const std::int64_t T = share(item, item.set.rows), M = own_.hidden, k = own_.experts_per_token;
    const bool again = item.kind == ItemKind::wave, recomputes = item.state.recomputes_attention();
    control(item, phase);
    if (last_stage_ && kind_.whole_rollout) head(item, phase, true);
    for_each_layer(item, [&](std::int64_t R, bool experts) {
      if (again) gather_context(item, phase);  // a trunk's keys and values are in the path
      if (again && recomputes) gather_context(item, phase);
      if (recomputes) give(tp_, Collective::sum, R * M * b_, phase.tp);
      give(tp_, Collective::sum, T * M * b_, phase.tp);
      give(tp_, Collective::sum, R * M * (experts ? s_ : b_), phase.tp);
      if (is_divided(item, cp_.ranks))
        give(cp_, Collective::scatter_sum, cp_.ranks * T * key_value_width() * s_, phase.cp);
      if (!experts) return;
      give(tp_, Collective::sum, R * k * s_, phase.tp);
      exchange(R, 2 * M * b_ + s_, M * s_ + s_, phase);
    });
    if (local_.place().pp > 0) give(pp_, Collective::send, T * M * b_, phase.pp);
  }

  void head(const PlanItem& item, AxisBytes& phase, bool with_gradient) {
    const std::int64_t O = share(item, item.set.outputs);
    if (O == 0 || local_.whole().value_head) return;
    const std::int64_t edges = share(item, this->edges(item));
    give(tp_, Collective::sum, O * kNumber, phase.tp);
    give(tp_, Collective::sum, (2 * O + edges) * kNumber, phase.tp);
    if (with_gradient) give(tp_, Collective::sum, O * own_.hidden * s_, phase.tp);
  }

  // Counts of every expert's choices, then of the choices of this rank's run of R rows `out` bytes each to the ranks
  // that have the experts, and `back` bytes each to the ranks whose choices came here: those of other trees have as
  // many.
  void exchange(std::int64_t R, std::int64_t out, std::int64_t back, AxisBytes& phase) {
    const Degrees& d = local_.degrees();
    if (d.ep == 1) return;
    const std::int64_t of_tp = local_.place().tp, run = R * (of_tp + 1) / d.tp - R * of_tp / d.tp;
    const std::int64_t others = R * d.ep / d.tp - run, k = own_.experts_per_token;
    give(ep_, Collective::exchange, own_.experts * kNumber / d.ep * (d.ep - 1), phase.ep);
    give(ep_, Collective::exchange, run * k * (d.ep - 1) / d.ep * out, phase.ep);
    give(ep_, Collective::exchange, others * k / d.ep * back, phase.ep);
  }

  std::int64_t key_value_width() const { return 2 * own_.kv_heads * own_.head_dim; }

  const LocalShape& local_;
  const ModelShape& own_;
  std::int64_t b_, s_;
  const StepKind& kind_;
  std::span<const Rollout> rollouts_;
  bool all_logprobs_, last_stage_ = true;
  Line tp_, cp_, pp_, ep_, replicas_, expert_replicas_;
};

Communication::Communication(const LocalShape& local, DType dtype, const StepKind& kind, const MachineProfile& profile)
    : local_(local), bytes_(element_bytes(dtype)), kind_(kind), profile_(profile) {}

PlannedTraffic Communication::of(const StepPlan& plan, std::span<const Rollout> rollouts) const {
  Walk walk(*this, rollouts, plan.all_logprobs);
  if (local_.degrees().ranks() == 1) return {};
  for (const PlanItem& item : plan.items) walk.add(item);
  if (kind_.gradients) walk.add_reduction();
  return walk.traffic;
}

}  // namespace espalier
