#include "espalier/forecast/communication.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "espalier/program/joint_order.h"
#include "espalier/program/program.h"
#include "espalier/program/shared_runs.h"
#include "espalier/program/stops.h"
#include "espalier/shape/parameter_shapes.h"

namespace espalier {
namespace {

constexpr std::int64_t kNumber = 8;                             // bytes of a double
constexpr double kLinkLatency = 5e-6, kNetworkLatency = 15e-6;  // seconds of one message; round

}  // namespace

enum class Collective { sum, gather, scatter_sum, exchange, send, broadcast };

// Ranks that share an axis, and the link between those that are farthest apart.
struct RankLine {
  std::int64_t ranks = 1;
  double bytes_per_second = 1, latency = 0;

  // By rings: every rank sends and receives at the link's rate.
  double seconds(Collective kind, double bytes) const {
    const double n = static_cast<double>(ranks), steps = std::ceil(std::log2(n)) * latency;
    switch (kind) {
      case Collective::sum:
        return 2 * (n - 1) / n * bytes / bytes_per_second + 2 * steps;
      case Collective::gather:
        return (n - 1) * bytes / bytes_per_second + steps;
      case Collective::scatter_sum:
        return (n - 1) / n * bytes / bytes_per_second + steps;
      case Collective::broadcast:
        return std::ceil(std::log2(n)) * (bytes / bytes_per_second + latency);
      case Collective::exchange:
      case Collective::send:
        return bytes / bytes_per_second + latency;
    }
    return 0;
  }
};

namespace {

// Ranks whose numbers lie within `span` of each other.
RankLine line_of(std::int64_t ranks, std::int64_t span, const MachineProfile& profile) {
  const bool near = span <= profile.ranks_per_machine;
  return {ranks, near ? profile.link_bytes_per_second : profile.network_bytes_per_second,
          near ? kLinkLatency : kNetworkLatency};
}

}  // namespace

class Communication::Walk {
 public:
  Walk(const Communication& of, std::span<const Rollout> rollouts, bool all_logprobs)
      : local_(of.local_),
        units_(of.units_),
        held_units_(of.held_units_),
        own_(of.local_.own()),
        b_(of.bytes_.activation),
        s_(of.bytes_.accumulator),
        kind_(of.kind_),
        profile_(of.profile_),
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
    last_stage_ = local_.is_last_stage();
  }

  // `plans`: of every rank of dp.
  void run(std::span<const StepPlan* const> plans) {
    const Degrees& d = local_.degrees();
    const Place& place = local_.place();
    const bool path_sharded = std::ranges::any_of(plans, [](const StepPlan* plan) { return plan->path.sharded; });
    const RankRange together = joint_ranks(d, place, path_sharded);
    path_ = plans[static_cast<std::size_t>(place.dp)]->path;
    std::vector<std::string> events;
    for (std::int64_t rank = together.begin; rank < together.begin + together.count; ++rank)
      events.push_back(events_of(plans[static_cast<std::size_t>(rank / d.cp)]->items, rank % d.cp));
    const std::vector<JointEvent> order = joint_order(std::move(events), d.cp, together.begin);
    const auto program_of_rank = [&](std::int64_t rank) {
      const StepPlan& plan = *plans[static_cast<std::size_t>(rank / d.cp)];
      return program_of(plan.items, order,
                        {static_cast<std::size_t>(rank - together.begin), rank % d.cp, d.cp,
                         waves_in_flight(d, place, kind_.gradients), plan.path.sharded});
    };
    const std::int64_t own = place.dp * d.cp + place.cp, of_ep = std::max<std::int64_t>(1, d.ep / d.tp);
    std::vector<std::pair<std::int64_t, Program>> others;  // of the ranks that share experts with this one
    for (std::int64_t rank = together.begin; rank < together.begin + together.count; ++rank)
      if (rank != own && (rank - together.begin) / of_ep == (own - together.begin) / of_ep)
        others.emplace_back(rank % d.cp, program_of_rank(rank));
    const Program program = program_of_rank(own);
    for (std::size_t at = 0; at < program.size(); ++at) {
      const Step& step = program[at];
      Turn turn{.item = step.own, .on_path = step.on_path};
      if (step.own) turn.rows = rows_on(*step.own, place.cp);
      for (const auto& [cp_rank, of_other] : others)
        if (of_other[at].own) turn.others.push_back(rows_on(*of_other[at].own, cp_rank));
      take(step, turn);
    }
  }

  // An event of others, forward and backward.
  void join() {
    AxisBytes ignored;
    forward(Turn{}, ignored);
    if (kind_.gradients) backward(Turn{}, ignored);
  }

  // Gradients of copies within tp, and of replicas.
  void add_reduction() {
    const double before = traffic.seconds;
    std::int64_t everybody = 0, experts = 0, first = 0;
    for_each_parameter(local_.whole(), [&](const ParameterShape& parameter) {
      const auto shard = local_.shard(parameter);
      if (!shard || !parameter.trains) return;
      std::int64_t count = 1;
      for (std::size_t dim = 0; dim < parameter.sides.size(); ++dim)
        count *= static_cast<int>(dim) == shard->dim ? shard->local : parameter.sides[dim].size;
      if (local_.degrees().full) {
        const Unit& unit = units_.at(first);
        first += std::exchange(count, unit.kept(first, count, unit.rank).count);
      } else {
        (shard->of_expert && local_.degrees().ep > 1 ? experts : everybody) += count;
      }
      if (shard->partial_gradient)
        give(tp_, Collective::sum, tp_.ranks / shard->copies * count * s_, traffic.bytes.reduction.tp);
    });
    const ModelShape& whole = local_.whole();
    const bool outer = local_.place().pp == 0 || last_stage_;
    const bool shared = whole.tied_head && outer && (whole.trained.all() || whole.trained.of_parameter->front());
    std::int64_t embedding = local_.vocabulary().size() * own_.hidden;
    if (shared && local_.degrees().full) {  // with its padding
      const Unit& unit = units_.all.front();
      embedding = unit.kept(0, own_.vocabulary * own_.hidden, unit.rank).count;
    }
    if (shared) give(pp_, Collective::send, embedding * s_, traffic.bytes.reduction.pp);
    give(replicas_, Collective::sum, everybody * s_, traffic.bytes.reduction.dp);
    give(expert_replicas_, Collective::sum, experts * s_, traffic.bytes.reduction.dp);
    traffic.reduction_seconds = traffic.seconds - before;
  }

  PlannedTraffic traffic;

 private:
  void give(const RankLine& line, Collective kind, std::int64_t bytes, std::int64_t& counter) {
    if (line.ranks == 1 || bytes == 0) return;
    counter += bytes;
    traffic.seconds += line.seconds(kind, static_cast<double>(bytes));
  }

  // A cp rank's part of an item: all its rows, and the rows with edges.
  struct Rows {
    std::int64_t all = 0, outputs = 0;
  };

  // This rank's part in an event.
  struct Turn {
    const PlanItem* item = nullptr;  // null: of others, this rank has no rows
    Rows rows = {};
    std::vector<Rows> others = {};  // of the ranks that share experts with this one
    bool on_path = false;           // ranks of its cp run it, and divide the path
  };

  void take(const Step& step, const Turn& turn) {
    const bool opens = step.pass == Pass::forward, trunk = step.kind == ItemKind::trunk;
    const std::int64_t own = trunk && turn.item ? turn.item->set.rows : 0;
    AxisBytes& phase = !trunk ? traffic.bytes.b : opens ? traffic.bytes.a : traffic.bytes.c;
    if (opens) {
      open_rows_ += own;
      forward(turn, phase);
    } else {
      if (kind_.gradients) backward(turn, phase);
      open_rows_ -= own;
    }
    if (open_rows_ == 0) layer_here_ = -1;
  }

  // The path's rows of a layer, keys and values.
  void bring_path(const Turn& turn, std::int64_t layer, std::int64_t rows, AxisBytes& phase) {
    if (!turn.on_path || layer < path_.layers_awake || open_rows_ == 0) return;
    const std::vector<PathKind> kinds = own_.mixer(layer).path_kinds(path_.latents);
    if (kinds.empty() || std::exchange(layer_here_, layer) == layer) return;
    for (const PathKind& kind : kinds) give(cp_, Collective::gather, path_share(rows) * kind.width * b_, phase.cp);
  }
  void sum_path(const Turn& turn, std::int64_t layer, std::int64_t rows, AxisBytes& phase) {
    if (!turn.on_path || layer < path_.layers_awake) return;
    for (const PathKind& kind : own_.mixer(layer).path_kinds(path_.latents))
      give(cp_, Collective::scatter_sum, cp_.ranks * path_share(rows) * kind.width * s_, phase.cp);
  }
  std::int64_t path_share(std::int64_t rows) const { return PathShares{rows, cp_.ranks}.most(); }
  std::int64_t rows_above(const Turn& turn) const { return turn.item ? turn.item->path_rows : open_rows_; }
  Rows rows_on(const PlanItem& item, std::int64_t cp_rank) {
    if (!is_sharded(item, cp_.ranks)) return {item.set.rows, item.set.outputs};
    const auto [found, is_new] = rows_.try_emplace({&item, cp_rank});
    if (!is_new) return found->second;
    const RowShares shares(item.set.rows, cp_.ranks);
    const std::vector<LossEdge> edges = edges_of(share_of(item.set, shares, cp_rank), rollouts_, all_logprobs_);
    return found->second = {shares.rows_of(cp_rank),
                            static_cast<std::int64_t>(outputs_of(edges, rollouts_, !local_.whole().value_head).size())};
  }
  std::vector<LossEdge> edges_here(const PlanItem& item) const {
    if (!is_sharded(item, cp_.ranks)) return edges_of(item.set, rollouts_, all_logprobs_);
    const RowShares shares(item.set.rows, cp_.ranks);
    return edges_of(share_of(item.set, shares, local_.place().cp), rollouts_, all_logprobs_);
  }
  std::int64_t edges(const RowSet& set) const {
    return static_cast<std::int64_t>(edges_of(set, rollouts_, all_logprobs_).size());
  }

  bool is_narrow(std::int64_t layer) const {
    return last_stage_ && layer + 1 == own_.layers() && !(kind_.all_rows_choose && own_.has_experts(layer));
  }
  std::int64_t continuing(const Rows& rows, std::int64_t layer) const {
    return is_narrow(layer) ? rows.outputs : rows.all;
  }

  // Counts the context of a layer, if the item is sharded over cp.
  void gather_context(const PlanItem& item, std::int64_t layer, AxisBytes& phase) {
    if (is_sharded(item, cp_.ranks)) give(cp_, Collective::gather, most_rows(item) * given_width(layer) * b_, phase.cp);
  }

  // Counts the states of a recurrent layer if the item is sharded over cp (SharedStates). Ranks run their rows in turn,
  // so that each waits for what all send. `passes`: over the rows of other ranks, in forwards of the recurrence.
  void pass_states(const Turn& turn, std::int64_t layer, bool back, double passes, AxisBytes& phase) {
    const std::int64_t bytes = state_bytes(turn, layer);
    if (bytes == 0) return;
    const SharedRuns& runs = runs_of(*turn.item);
    for (const SharedRuns::Transfer& transfer : runs.transfers)
      send_state(back ? transfer.to : runs.legs[transfer.leg].rank, Collective::send, bytes, phase);
    const Mixer& mixer = own_.mixer(layer);
    traffic.seconds += passes * static_cast<double>(turn.item->set.rows - turn.rows.all) * mixer.flops().row /
                       profile_.row_rate(mixer.kind());
  }
  void leave_state(const Turn& turn, std::int64_t layer, AxisBytes& phase) {
    if (const std::int64_t bytes = state_bytes(turn, layer); bytes > 0 && turn.item->kind == ItemKind::trunk)
      send_state(runs_of(*turn.item).legs.back().rank, Collective::broadcast, bytes, phase);
  }
  void sum_state(const Turn& turn, std::int64_t layer, AxisBytes& phase) {
    if (const std::int64_t bytes = state_bytes(turn, layer); bytes > 0 && turn.item->kind == ItemKind::trunk)
      give(cp_, Collective::sum, bytes, phase.cp);
  }
  // Bytes of one state, where ranks share the rows; else 0.
  std::int64_t state_bytes(const Turn& turn, std::int64_t layer) const {
    return turn.item && is_sharded(*turn.item, cp_.ranks) ? own_.mixer(layer).state() * s_ : 0;
  }
  void send_state(std::int64_t rank, Collective kind, std::int64_t bytes, AxisBytes& phase) {
    if (rank == local_.place().cp) phase.cp += bytes;
    traffic.seconds += cp_.seconds(kind, static_cast<double>(bytes));
  }
  const SharedRuns& runs_of(const PlanItem& item) {
    const auto found = runs_.find(&item);
    if (found != runs_.end()) return found->second;
    return runs_.emplace(&item, SharedRuns(item.set, RowShares(item.set.rows, cp_.ranks))).first->second;
  }

  std::int64_t most_rows(const PlanItem& item) const { return RowShares(item.set.rows, cp_.ranks).most(); }
  void control(const PlanItem& item, AxisBytes& phase) {
    if (!is_sharded(item, cp_.ranks)) return;
    if (kind_.whole_rollout && last_stage_) give(cp_, Collective::sum, 2 * edges(item.set) * kNumber, phase.cp);
    const ModelShape& whole = local_.whole();
    if (kind_.counts_rollouts && kind_.gradients)
      give(cp_, Collective::sum,
           static_cast<std::int64_t>(item.set.rollouts.size()) * whole.layers() * whole.experts * kNumber, phase.cp);
  }

  // Counts the gathers of sharded units.
  void gather(std::int64_t what, AxisBytes& phase) {
    for (const Units* units : {&units_, &held_units_})
      for (const Unit& unit : units->all)
        if (unit.what == what) give(holders_of(unit), Collective::gather, unit.part() * b_, phase.dp);
  }
  void scatter_sum(std::int64_t what, AxisBytes& phase) {
    for (const Unit& unit : units_.all)
      if (unit.what == what) give(holders_of(unit), Collective::scatter_sum, unit.whole() * s_, phase.dp);
  }
  const RankLine& holders_of(const Unit& unit) const { return unit.experts ? expert_replicas_ : replicas_; }

  // Around a stop.
  void move_unit(const Stop& stop, AxisBytes& phase) {
    if (stop.reads_weights) gather(stop.unit, phase);
    if (stop.adds_gradients) scatter_sum(stop.unit, phase);
  }

  void forward(const Turn& turn, AxisBytes& phase) {
    const std::int64_t T = turn.rows.all, M = own_.hidden;
    for (const Stop& stop : decoder_stops(local_, Pass::forward)) {
      move_unit(stop, phase);
      if (stop.kind == Stop::Kind::embedding) {
        give(tp_, Collective::sum, T * M * b_, phase.tp);
        if (const std::int64_t P = own_.layer_inputs.width; P > 0)
          give(tp_, Collective::sum, T * own_.layers() * P * b_, phase.tp);
      }
      if (stop.is_layer()) forward_layer(turn, stop.unit, phase);
    }
    if (turn.item) control(*turn.item, phase);
    if (!last_stage_) give(pp_, Collective::send, T * M * b_, phase.pp);
    head(turn, Pass::forward, phase);
  }

  void forward_layer(const Turn& turn, std::int64_t layer, AxisBytes& phase) {
    const bool experts = own_.has_experts(layer);
    const std::int64_t R = continuing(turn.rows, layer), M = own_.hidden;
    bring_path(turn, layer, rows_above(turn), phase);
    if (turn.item) gather_context(*turn.item, layer, phase);
    pass_states(turn, layer, false, 1, phase), leave_state(turn, layer, phase);
    give(tp_, Collective::sum, R * M * b_, phase.tp);
    sum_mlp(layer, R, phase);
    if (experts) exchange(turn, layer, M * b_, M * b_, phase);
  }

  // The sums over tp of R rows behind a layer's MLP, or of their gradients; experts apart have two. `again`: a
  // recomputation, which stops before the sum unless a norm behind it is computed again. With several ranks of ep,
  // experts apart give their results in the backward alone.
  void sum_mlp(std::int64_t layer, std::int64_t R, AxisBytes& phase, bool again = false) {
    const LayerShape& of = own_.at(layer);
    if (of.mlp == MlpKind::none || (again && !of.has_norms_after())) return;
    const std::int64_t bytes = R * own_.hidden * (of.has_experts() ? s_ : b_);
    give(tp_, Collective::sum, bytes, phase.tp);
    if (of.has_experts() && own_.shared_expert.apart && (!again || local_.degrees().ep == 1))
      give(tp_, Collective::sum, bytes, phase.tp);
  }

  void backward(const Turn& turn, AxisBytes& phase) {
    if (turn.item) control(*turn.item, phase);
    head(turn, Pass::backward, phase);
    for (const Stop& stop : decoder_stops(local_, Pass::backward)) {
      move_unit(stop, phase);
      if (stop.is_layer()) backward_layer(turn, stop.unit, phase);
    }
    if (own_.trained.input && !local_.is_first_stage())
      give(pp_, Collective::send, turn.rows.all * own_.hidden * b_, phase.pp);
  }

  void backward_layer(const Turn& turn, std::int64_t layer, AxisBytes& phase) {
    const PlanItem* item = turn.item;
    const bool again = item && item->kind == ItemKind::wave, recomputes = item && item->state.recomputes_attention();
    const bool experts = own_.has_experts(layer);
    const std::int64_t T = turn.rows.all, R = continuing(turn.rows, layer), M = own_.hidden;
    bring_path(turn, layer, open_rows_, phase), sum_path(turn, layer, rows_above(turn), phase);
    // The path has what a trunk gave: keys and values, or latents.
    if (again || (item && own_.mixer(layer).narrows_path() && !path_.latents)) gather_context(*item, layer, phase);
    if (again && recomputes) gather_context(*item, layer, phase);
    if (recomputes) pass_states(turn, layer, false, 1, phase);
    sum_state(turn, layer, phase);
    pass_states(turn, layer, false, 1, phase);  // the states are made again
    pass_states(turn, layer, true, own_.mixer(layer).flops().row_backward, phase);
    if (recomputes) give(tp_, Collective::sum, R * M * b_, phase.tp);
    if (item && item->state.recomputes_mlp()) sum_mlp(layer, R, phase, true);
    give(tp_, Collective::sum, T * M * b_, phase.tp);
    sum_mlp(layer, R, phase);
    if (item && is_sharded(*item, cp_.ranks))
      give(cp_, Collective::scatter_sum, cp_.ranks * most_rows(*item) * given_width(layer) * s_, phase.cp);
    if (!experts) return;
    give(tp_, Collective::sum, R * own_.experts_per_token * s_, phase.tp);
    if (own_.shared_expert.gate) give(tp_, Collective::sum, R * s_, phase.tp);
    exchange(turn, layer, 2 * M * b_ + s_, M * s_ + s_, phase);
    if (!own_.shared_expert.apart || local_.degrees().ep == 1) return;
    exchange(turn, layer, M * b_, M * b_, phase);  // the experts' results once more
    give(tp_, Collective::sum, R * M * s_, phase.tp);
  }

  void head(const Turn& turn, Pass pass, AxisBytes& phase) {
    const HeadGradient when = !kind_.gradients      ? HeadGradient::none
                              : kind_.whole_rollout ? HeadGradient::in_backward
                                                    : HeadGradient::in_forward;
    const std::optional<Stop> stop = head_stop(local_, pass, when);
    if (!stop) return;
    move_unit(*stop, phase);
    const std::int64_t O = turn.rows.outputs;
    if (turn.item == nullptr || O == 0 || tp_.ranks == 1 || local_.whole().value_head) return;
    const std::vector<LossEdge> here = edges_here(*turn.item);
    const std::int64_t D = kind_.kept_ids == 0 ? O : std::ssize(distributions_of(here, rollouts_));
    give(tp_, Collective::sum, D * kNumber, phase.tp);
    give(tp_, Collective::sum, (2 * D + std::ssize(here)) * kNumber, phase.tp);
    if (stop->adds_gradients) give(tp_, Collective::sum, O * own_.hidden * s_, phase.tp);
  }

  // Counts of every expert's choices, then of the choices of this rank's run of its rows `out` bytes each to the ranks
  // that have the experts, and `back` bytes each to the ranks whose choices came here.
  void exchange(const Turn& turn, std::int64_t layer, std::int64_t out, std::int64_t back, AxisBytes& phase) {
    const Degrees& d = local_.degrees();
    if (d.ep == 1) return;
    const std::int64_t R = continuing(turn.rows, layer), of_tp = local_.place().tp, k = own_.experts_per_token;
    const std::int64_t run = R * (of_tp + 1) / d.tp - R * of_tp / d.tp;
    std::int64_t others = R - run;
    for (const Rows& rows : turn.others) others += continuing(rows, layer);
    give(ep_, Collective::exchange, own_.experts * kNumber / d.ep * (d.ep - 1), phase.ep);
    give(ep_, Collective::exchange, run * k * (d.ep - 1) / d.ep * out, phase.ep);
    give(ep_, Collective::exchange, others * k / d.ep * back, phase.ep);
  }

  // Numbers that ranks of cp give to each other for a row.
  std::int64_t given_width(std::int64_t layer) const {
    const Mixer& mixer = own_.mixer(layer);
    std::int64_t width = 0;
    for (const PathKind& kind : mixer.path_kinds(mixer.narrows_path())) width += kind.width;
    return width;
  }

  const LocalShape& local_;
  const Units &units_, &held_units_;
  const ModelShape& own_;
  std::int64_t b_, s_;
  const StepKind& kind_;
  const MachineProfile& profile_;
  std::span<const Rollout> rollouts_;
  bool all_logprobs_, last_stage_ = true;
  PathPlan path_;
  std::map<std::pair<const PlanItem*, std::int64_t>, Rows> rows_;  // of divided items, by rank of cp
  std::map<const PlanItem*, SharedRuns> runs_;                     // of divided items of recurrent models
  std::int64_t open_rows_ = 0, layer_here_ = -1;  // of the path; of a divided one the layer that lies whole here
  RankLine tp_, cp_, pp_, ep_, replicas_, expert_replicas_;
};

Communication::Communication(const LocalShape& local, DType dtype, const StepKind& kind, const MachineProfile& profile)
    : local_(local), bytes_(element_bytes(dtype)), kind_(kind), profile_(profile) {
  if (!local.degrees().full) return;
  units_ = units_of(local, Parameters::trained);
  held_units_ = units_of(local, Parameters::held);
}

double Communication::seconds_of_units() const {
  if (units_.all.empty() && held_units_.all.empty()) return 0;
  Walk walk(*this, {}, false);
  walk.join();
  return walk.traffic.seconds;
}

double Communication::seconds_of_path(std::int64_t rows_above, std::int64_t own_rows, const PathPlan& path) const {
  const Degrees& d = local_.degrees();
  const RankLine cp = line_of(d.cp, d.tp * d.cp, profile_);
  const auto of_layer = [&](const Mixer& mixer) {
    const std::vector<PathKind> kinds = mixer.path_kinds(path.latents);
    const auto seconds = [&](Collective kind, std::int64_t rows, std::int64_t bytes) {
      double sum = 0;
      for (const PathKind& of : kinds)
        if (rows > 0) sum += cp.seconds(kind, static_cast<double>(PathShares{rows, d.cp}.most() * of.width * bytes));
      return sum;
    };
    double sum = seconds(Collective::gather, rows_above, bytes_.activation);
    if (kind_.gradients)
      sum += seconds(Collective::gather, rows_above + own_rows, bytes_.activation) +
             seconds(Collective::scatter_sum, rows_above, d.cp * bytes_.accumulator);
    return sum;
  };
  double sum = 0;
  const std::vector<LayerShape>& layers = local_.own().layer;
  std::size_t end = 0;  // of layers of one mixer
  for (auto begin = static_cast<std::size_t>(path.layers_awake); begin < layers.size(); begin = end) {
    for (end = begin + 1; end < layers.size() && layers[end].mixer == layers[begin].mixer;) ++end;
    sum += static_cast<double>(end - begin) * of_layer(*layers[begin].mixer);
  }
  return sum;
}

PlannedTraffic Communication::of(const StepPlan& plan, std::span<const Rollout> rollouts) const {
  return of(std::vector(static_cast<std::size_t>(local_.degrees().dp), &plan), rollouts);
}

PlannedTraffic Communication::of(std::span<const StepPlan* const> plans, std::span<const Rollout> rollouts) const {
  if (local_.degrees().ranks() == 1) return {};
  Walk walk(*this, rollouts, plans.front()->all_logprobs);
  walk.run(plans);
  if (kind_.gradients) walk.add_reduction();
  return walk.traffic;
}

}  // namespace espalier
