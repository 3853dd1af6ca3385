#include "espalier/plan/rank_layout.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/base/units.h"
#include "espalier/forecast/communicators.h"
#include "espalier/forecast/memory_model.h"
#include "espalier/forecast/pipeline_time.h"
#include "espalier/plan/dealing.h"
#include "espalier/program/row_shares.h"

namespace espalier {
namespace {

// A plan as one stage runs it: divided sets with 1 / cp of their rows on every rank of cp, waves dealt whole on one.
class StageWalk {
 public:
  StageWalk(const LocalShape& local, const PlanOptions& options, const MachineProfile& profile)
      : model_(local, profile, options.dtype, options.kind, options.setting),
        forward_(local, profile, options.dtype, forward_of(options.kind), options.setting),
        bytes_(local, options.dtype, options.kind, options.setting),
        local_(local),
        cp_(local.degrees().cp),
        stages_(local.degrees().pp),
        load_(static_cast<std::size_t>(cp_)) {}

  void run(const StepPlan& plan) {
    path_ = plan.path;
    PeakWalk walk(bytes_);
    walk.run(program_of(plan.items, bytes_.waves_in_flight()));  // of all ranks of cp, as if one had every wave
    for (const PlanItem& item : plan.items) {
      add(item);
      if (item.kind == ItemKind::trunk) idle += seconds_of_waiting(stage_of(&item, item.below), stages_);
    }
    idle += seconds_of_waiting(stage_of(nullptr, plan.items), stages_);
    const Load& most = *std::ranges::max_element(load_, {}, &Load::seconds);
    busiest = &most - load_.data();
    seconds = most.seconds, flops = most.flops;
    for (const Load& load : load_) flops_of_all += static_cast<double>(local_.degrees().tp) * load.flops;
    const PathBytes path = bytes_.path(plan.path_rows(), path_);
    stored = walk.stored(), path_stored = path.stored;
    peaks = walk.peaks(bytes_.constant() + bytes_.scratch(plan.max_rows, plan.max_path_rows, model_.threads()) +
                           bytes_.in_flight(stored) + bytes_.in_flight(path_stored),
                       path);
  }

  std::int64_t busiest = 0;                 // rank of cp
  double seconds = 0, idle = 0, flops = 0;  // of it
  double flops_of_all = 0;                  // of all ranks of tp and cp
  PhasePeaks peaks;
  std::int64_t stored = 0, path_stored = 0;  // most that it has offloaded at a time

 private:
  struct Load {
    double seconds = 0, flops = 0;
  };

  static StepKind forward_of(StepKind kind) {
    kind.gradients = kind.counting_pass = kind.sequence_pass = false;
    return kind;
  }

  double seconds_of(const PlanItem& item) const {
    const std::int64_t own = item.kind == ItemKind::trunk ? item.set.rows : 0;
    return model_.seconds(work_on(item, local_), item.state, bytes_.path_traffic(item.path_rows, own, path_));
  }
  double forward_seconds_of(const PlanItem& item) const { return forward_.seconds(work_on(item, local_), ItemState()); }

  // Seconds of the trunk, if there is one, and of the mean of the waves among the items.
  StageSeconds stage_of(const PlanItem* trunk, const std::vector<PlanItem>& items) const {
    StageSeconds out;
    if (trunk != nullptr) {
      out.trunk_forward = forward_seconds_of(*trunk);
      out.trunk_backward = seconds_of(*trunk) - out.trunk_forward;
    }
    double waves = 0;
    for (const PlanItem& item : items) {
      if (item.kind != ItemKind::wave) continue;
      const double forward = forward_seconds_of(item);
      out.wave_forward += forward, out.wave_backward += seconds_of(item) - forward, waves += 1;
    }
    if (waves > 0) out.wave_forward /= waves, out.wave_backward /= waves;
    return out;
  }

  void add(const PlanItem& item) {
    const double own_seconds = seconds_of(item), own_flops = model_.flops(work_on(item, local_), item.state);
    for (std::int64_t rank = 0; rank < cp_; ++rank)
      if (Load& load = load_[static_cast<std::size_t>(rank)]; runs_on(item, rank))
        load.seconds += own_seconds, load.flops += own_flops;
    for (const PlanItem& below : item.below) add(below);
  }

  CostModel model_, forward_;
  ActivationBytes bytes_;
  const LocalShape& local_;
  std::int64_t cp_;
  std::int64_t stages_;
  std::vector<Load> load_;  // by rank of cp
  PathPlan path_;
};

std::int64_t trunks_in(const std::vector<PlanItem>& items) {
  std::int64_t count = 0;
  for (const PlanItem& item : items) count += (item.kind == ItemKind::trunk ? 1 : 0) + trunks_in(item.below);
  return count;
}

// The busiest one alone, or all.
std::vector<std::int64_t> asked_ranks(const std::vector<std::vector<PrefixTree>>& dealt, const LayoutProblem& problem,
                                      const LocalShape& local, const PlanOptions& options, WhichRanks which) {
  std::vector<std::int64_t> all;
  std::vector<double> load;
  for (const std::vector<PrefixTree>& trees : dealt) {
    all.push_back(static_cast<std::int64_t>(all.size()));
    if (which == WhichRanks::all) continue;
    const auto seconds = seconds_of_trees(problem.rollouts, trees, local, options, problem.profile);
    load.push_back(std::accumulate(seconds.begin(), seconds.end(), 0.0));
  }
  if (which == WhichRanks::all) return all;
  return {std::ranges::max_element(load) - load.begin()};
}

void add_rank(LayoutPlan& layout, const StepForecast& forecast, std::int64_t dp, std::int64_t trees) {
  for (RankCost rank : forecast.stages) {
    rank.dp = dp, rank.trees = trees;
    for (auto peak : {&PhasePeaks::a, &PhasePeaks::b, &PhasePeaks::c})
      layout.bytes.*peak = std::max(layout.bytes.*peak, rank.cost.bytes.*peak);
    layout.ranks.push_back(std::move(rank));
  }
  if (forecast.seconds() <= layout.seconds) return;
  layout.seconds = forecast.seconds();
  layout.compute_seconds = forecast.compute, layout.communication_seconds = forecast.communication;
  layout.bubble = forecast.compute > 0 ? forecast.idle / (forecast.compute + forecast.idle) : 0;
}

Json bytes_json(const TrafficBytes& bytes) {
  Json out = Json::object();
  const auto add = [&](const char* phase, const AxisBytes& axes) {
    for (const auto& [name, count] :
         {std::pair{"tp", axes.tp}, {"cp", axes.cp}, {"pp", axes.pp}, {"dp", axes.dp}, {"ep", axes.ep}})
      if (count > 0) out[name][phase] = count;
  };
  add("A", bytes.a), add("B", bytes.b), add("C", bytes.c), add("reduction", bytes.reduction);
  return out;
}

Json peaks_json(const PhasePeaks& peaks) { return {{"A", peaks.a}, {"B", peaks.b}, {"C", peaks.c}}; }

}  // namespace

Work work_on(const PlanItem& item, const LocalShape& rank) {
  const Degrees& d = rank.degrees();
  const std::int64_t parts = is_sharded(item, d.cp) ? d.cp : 1;
  const auto share = [parts](std::int64_t whole) { return (whole + parts - 1) / parts; };
  const std::int64_t rows = share(item.set.rows), pairs = share(item.set.pairs), seen = share(item.set.window_pairs);
  if (!rank.is_last_stage()) return {rows, pairs, rows, pairs, seen, seen, item.set.forks};  // all layers run all rows
  return {rows,
          pairs,
          share(item.set.outputs),
          share(item.set.output_pairs),
          seen,
          share(item.set.window_output_pairs),
          item.set.forks};
}

StepForecast forecast(std::span<const StepPlan* const> plans, std::int64_t dp, std::span<const Rollout> rollouts,
                      const LocalShape& rank, const PlanOptions& options, const MachineProfile& profile) {
  StepForecast out;
  const StepPlan& plan = *plans[static_cast<std::size_t>(dp)];
  const Degrees& d = rank.degrees();
  for (std::int64_t pp = 0; pp < d.pp; ++pp) {
    Place place = rank.place();
    place.dp = dp, place.pp = pp, place.cp = 0;
    const LocalShape stage(rank.whole(), d, place);
    RankCost cost{dp, pp, 0, plan.physical_rows(), plan.chosen, static_cast<double>(d.tp) * plan.chosen.flops, {}};
    cost.path = plan.path.state();
    if (d.pp > 1 || d.cp > 1) {
      StageWalk walk(stage, options, profile);
      walk.run(plan);
      cost.cost.seconds = walk.seconds, cost.cost.flops = walk.flops, cost.cost.bytes = walk.peaks;
      cost.cost.stored_bytes = walk.stored, cost.cost.path_stored_bytes = walk.path_stored;
      cost.flops_of_all = walk.flops_of_all;
      out.idle = std::max(out.idle, walk.idle);
      place.cp = walk.busiest;
    }
    cost.traffic = Communication({rank.whole(), d, place}, options.dtype, options.kind, profile).of(plans, rollouts);
    out.compute = std::max(out.compute, cost.cost.seconds);
    out.communication = std::max(out.communication, cost.traffic.seconds);
    out.stages.push_back(std::move(cost));
  }
  return out;
}

PlanOptions options_of_rank(const LayoutProblem& problem, const Degrees& degrees) {
  PlanOptions options = problem.options;
  options.must_fit = options.remedies = false;
  if (problem.shard == Sharding::optimizer) options.setting.held.optimizer_shares = degrees.dp;
  for (const ModelShape& other : problem.beside)
    options.setting.held.beside_bytes +=
        ActivationBytes(LocalShape(other, degrees, {}), options.dtype, options.kind, options.setting).model();
  return options;
}

LayoutPlan plan_layout(const LayoutProblem& problem, const Degrees& given, WhichRanks which) {
  Degrees degrees = given;
  if (problem.shard == Sharding::optimizer && degrees.ep > degrees.tp)
    throw UnsupportedError({"--shard", "none or full, because experts are sharded over dp", name_of(problem.shard),
                            "use --shard full, which also shards experts, or --ep of at most --tp"});
  check_degrees(degrees);
  degrees.full = problem.shard == Sharding::full && degrees.dp * degrees.cp > 1;
  LayoutPlan layout;
  layout.degrees = degrees, layout.shard = problem.shard;
  if (problem.options.setting.device.cuda) layout.communicator_bytes = communicator_bytes(degrees, problem.shape);
  std::vector<LocalShape> stages;
  for (std::int64_t stage = 0; stage < degrees.pp; ++stage) {
    stages.emplace_back(problem.shape, degrees, Place{.pp = stage});
    layout.parameters = std::max(layout.parameters, stages.back().parameters());
  }
  const PlanOptions options = options_of_rank(problem, degrees);
  const LocalShape planned = stages.front().last_stage();
  const auto [dealt, repeated_rows] =
      deal_trees(problem.trees, degrees.dp, problem.rollouts, planned, options, problem.profile);
  layout.repeated_rows = repeated_rows;
  const std::vector<std::int64_t> asked = asked_ranks(dealt, problem, planned, options, which);
  std::vector<StepPlan> plans;
  for (const std::int64_t dp : asked) {
    const auto& trees = dealt[static_cast<std::size_t>(dp)];
    plans.push_back(make_plan(problem.rollouts, trees, planned, options, problem.profile));
    deal_waves(plans.back().items, degrees.cp);
    layout.trunk_forwards += trunks_in(plans.back().items);
  }
  std::vector<const StepPlan*> by_dp;  // of one rank alone: as if all had its plan
  for (std::int64_t dp = 0; dp < degrees.dp; ++dp)
    by_dp.push_back(&plans[which == WhichRanks::all ? static_cast<std::size_t>(dp) : 0]);
  for (const std::int64_t dp : asked)
    add_rank(layout, forecast(by_dp, dp, problem.rollouts, stages.front(), options, problem.profile), dp,
             static_cast<std::int64_t>(dealt[static_cast<std::size_t>(dp)].size()));

  double sum = 0, most = 0;
  std::int64_t rows = 0, most_rows = 0;
  for (std::size_t first = 0; first < layout.ranks.size(); first += stages.size()) {
    rows += layout.ranks[first].rows, most_rows = std::max(most_rows, layout.ranks[first].rows);
    double compute = 0;
    for (std::size_t stage = 0; stage < stages.size(); ++stage)
      compute = std::max(compute, layout.ranks[first + stage].cost.seconds);
    sum += compute, most = std::max(most, compute);
  }
  if (most > 0) layout.balance = sum / static_cast<double>(asked.size()) / most;
  if (rows > 0)
    layout.row_balance = static_cast<double>(most_rows) * static_cast<double>(asked.size()) / static_cast<double>(rows);
  const std::int64_t budget = problem.options.memory_budget;
  if (budget > 0) layout.missing_bytes = std::max<std::int64_t>(0, layout.bytes.peak() - budget);
  for (RankCost& rank : layout.ranks) rank.cost.fits = budget == 0 || rank.cost.bytes.peak() <= budget;
  layout.plans = std::move(plans);
  return layout;
}

namespace {

PlanCost cost_of(const LayoutPlan& layout) {
  PlanCost cost;
  cost.seconds = layout.seconds, cost.bytes = layout.bytes, cost.fits = layout.fits();
  for (const RankCost& rank : layout.ranks) {
    cost.flops += rank.flops_of_all;
    cost.stored_bytes = std::max(cost.stored_bytes, rank.cost.stored_bytes);
    cost.path_stored_bytes = std::max(cost.path_stored_bytes, rank.cost.path_stored_bytes);
  }
  return cost;
}

// Items, trees and rows of all ranks of dp.
StepPlan plan_of_all(const LayoutPlan& layout) {
  StepPlan all = layout.plans.front();
  double dense = 0, ideal = 0;
  for (const StepPlan& plan : layout.plans) {
    dense += plan.dense.flops, ideal += plan.dense.flops / plan.ceiling;
    if (&plan == &layout.plans.front()) continue;
    all.items.insert(all.items.end(), plan.items.begin(), plan.items.end());
    all.trees.insert(all.trees.end(), plan.trees.begin(), plan.trees.end());
    for (auto count :
         {&StepPlan::logical_rows, &StepPlan::trunk_rows, &StepPlan::wave_rows, &StepPlan::trunks, &StepPlan::waves})
      all.*count += plan.*count;
    all.max_path_rows = std::max(all.max_path_rows, plan.max_path_rows);
    all.max_window_rows = std::max(all.max_window_rows, plan.max_window_rows);
    all.max_rows = std::max(all.max_rows, plan.max_rows);
    all.token_budget = std::max(all.token_budget, plan.token_budget);
    if (plan.path.state() != PathState::keep) all.path = plan.path;
  }
  all.ceiling = ideal > 0 ? dense / ideal : 1;
  return all;
}

}  // namespace

StepPlan step_on_ranks(const LayoutProblem& problem, const LayoutPlan& layout) {
  StepPlan all = plan_of_all(layout);
  all.chosen = cost_of(layout);
  LayoutProblem other = problem;
  for (const auto& [schedule, cost] : {std::pair(Schedule::dense, &StepPlan::dense),
                                       {Schedule::packed, &StepPlan::packed},
                                       {Schedule::phased, &StepPlan::phased}}) {
    other.options.schedule = schedule;
    all.*cost = problem.options.schedule == schedule ? all.chosen : cost_of(plan_layout(other, layout.degrees));
  }
  all.missing_bytes = layout.missing_bytes;
  all.remedy.clear();
  if (layout.fits()) return all;
  const auto least = [&](const PlanOptions& changed) {
    return least_budget([&](std::int64_t budget) {
      LayoutProblem within = problem;
      within.options = changed, within.options.memory_budget = budget;
      return plan_layout(within, layout.degrees).bytes.peak();
    });
  };
  const std::int64_t needed = least(problem.options);
  all.missing_bytes = needed - problem.options.memory_budget;
  all.remedy = remedy_for(needed, problem.options, least);
  return all;
}

ScheduleCost cost_on_ranks(const LayoutProblem& problem, const Degrees& degrees) {
  try {
    const LayoutPlan layout = plan_layout(problem, degrees, WhichRanks::busiest);
    return {cost_of(layout), layout.plans.front().token_budget};
  } catch (const OptionError&) {  // a budget that cuts a path into thousands of trunks
    PlanCost cost;
    cost.fits = false;
    return {cost, problem.options.token_budget};
  }
}

Json to_json(const LayoutPlan& layout) {
  const Degrees& d = layout.degrees;
  const auto longest = std::ranges::max_element(
      layout.ranks, {}, [](const RankCost& rank) { return rank.cost.seconds + rank.traffic.seconds; });
  Json each = Json::array();
  for (const RankCost& rank : layout.ranks)
    each.push_back({{"dp", rank.dp},
                    {"pp", rank.pp},
                    {"trees", rank.trees},
                    {"rows", rank.rows},
                    {"flops", rank.cost.flops},
                    {"seconds", rank.cost.seconds},
                    {"communication_seconds", rank.traffic.seconds},
                    {"peak_bytes", peaks_json(rank.cost.bytes)},
                    {"path_state", name_of(rank.path)},
                    {"bytes", bytes_json(rank.traffic.bytes)},
                    {"fits", rank.cost.fits}});
  return {{"tp", d.tp},
          {"cp", d.cp},
          {"pp", d.pp},
          {"ep", d.ep},
          {"dp", d.dp},
          {"shard", name_of(layout.shard)},
          {"processes", d.ranks()},
          {"seconds", layout.seconds},
          {"parameters", layout.parameters},
          {"trunk_forwards", layout.trunk_forwards},
          {"ranks",
           {{"peak_bytes", peaks_json(layout.bytes)},
            {"communicator_bytes", layout.communicator_bytes},
            {"seconds", layout.compute_seconds},
            {"communication_seconds", layout.communication_seconds},
            {"bytes", longest == layout.ranks.end() ? Json::object() : bytes_json(longest->traffic.bytes)}}},
          {"by_rank", each},
          {"balance", layout.balance},
          {"largest_rows_over_mean", layout.row_balance},
          {"repeated_rows", layout.repeated_rows},
          {"bubble", layout.bubble},
          {"fits", layout.fits()}};
}

std::string explain(const LayoutPlan& layout) {
  const PhasePeaks& bytes = layout.bytes;
  const auto longest = std::ranges::max_element(
      layout.ranks, {}, [](const RankCost& rank) { return rank.cost.seconds + rank.traffic.seconds; });
  std::string out = text_of(
      "Layout ", text_of_degrees(layout.degrees), layout.shard == Sharding::optimizer ? ", shard optimizer" : "", " (",
      layout.degrees.ranks(), " processes): ", format_seconds(layout.seconds), " a step, of which ",
      format_seconds(layout.communication_seconds), " communication; balance ", std::lround(100 * layout.balance),
      "%, pipeline bubble ", std::lround(100 * layout.bubble), "%\n", "  a rank: ", format_count(layout.parameters),
      " parameters, peak ", format_bytes(bytes.peak()), " (A ", format_bytes(bytes.a), ", B ", format_bytes(bytes.b),
      ", C ", format_bytes(bytes.c), ")\n");
  if (layout.communicator_bytes > 0)
    out += text_of("  NCCL holds ", format_bytes(layout.communicator_bytes), " of it: communicators with ",
                   kNcclChannels, " channels and buffers of its default sizes (not measured)\n");
  if (layout.degrees.dp > 1)
    out += text_of("  rows: the rank with most has ", format_percent(layout.row_balance), " of the mean; ",
                   layout.repeated_rows == 0
                       ? std::string("no tree is cut")
                       : text_of("trees are cut, ranks repeat ", format_count(layout.repeated_rows), " rows"),
                   "\n");
  if (longest == layout.ranks.end()) return out;
  if (longest->path == PathState::divide) out += "  the path is sharded over cp\n";
  if (longest->path == PathState::offload) out += "  the path is offloaded\n";
  if (longest->path == PathState::latents) out += "  the path is kept as latents\n";
  std::string given;
  const Json by_axis = bytes_json(longest->traffic.bytes);
  for (const auto& [axis, phases] : by_axis.items()) {
    given += text_of(given.empty() ? "  it gives to others: " : "; ", axis);
    for (const auto& [phase, count] : phases.items())
      given += text_of(' ', phase, ' ', format_bytes(count.get<std::int64_t>()));
  }
  return out + (given.empty() ? "" : given + "\n");
}

}  // namespace espalier
