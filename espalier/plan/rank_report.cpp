// Shares of a plan.
#include "espalier/plan/rank_report.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/base/units.h"
#include "espalier/plan/local_shape.h"
#include "espalier/plan/memory_model.h"

namespace espalier {
namespace {

std::int64_t share(std::int64_t whole, std::int64_t parts) { return (whole + parts - 1) / parts; }

// Of a rank of the last stage, which has as many layers as any. The router of a rank is charged with its own experts.
ModelShape shape_of_rank(const ModelShape& whole, const Degrees& degrees) {
  const LocalShape local(whole, degrees, {.pp = degrees.pp - 1});
  ModelShape rank = local.own();
  rank.experts = local.experts().size();
  return rank;
}

class RankWalk {
 public:
  RankWalk(const ModelShape& shape, DType dtype, std::int64_t cp, const MachineProfile& profile, const StepKind& kind)
      : model_(shape, profile, dtype, kind), bytes_(shape, dtype, kind), walk_(bytes_), cp_(cp) {}

  double add(const PlanItem& item, std::int64_t held) {
    const RowSet& set = item.set;
    const Work work{share(set.rows, cp_), share(set.pairs, cp_), share(set.outputs, cp_), share(set.output_pairs, cp_)};
    double seconds = model_.seconds(work, item.state);
    flops_ += model_.flops(work, item.state);
    if (item.kind == ItemKind::wave) {
      walk_.wave(work, item.state, held);
      return seconds;
    }
    const std::int64_t open = walk_.open_trunk(work, item.state, held);
    for (const PlanItem& below : item.below) seconds += add(below, open);
    walk_.close_trunk(work, item.state, held);
    return seconds;
  }

  double take_flops() { return std::exchange(flops_, 0.0); }
  PhasePeaks peaks(std::int64_t path_rows, std::int64_t max_rows) const {
    const std::int64_t rows = share(max_rows, cp_), above = share(path_rows, cp_);
    return walk_.peaks(bytes_.constant() + bytes_.scratch(rows, above) + bytes_.path(above) +
                       bytes_.in_flight(walk_.stored()));
  }

 private:
  CostModel model_;
  ActivationBytes bytes_;
  PeakWalk walk_;
  std::int64_t cp_;
  double flops_ = 0;
};

}  // namespace

RankReport rank_report(const StepPlan& plan, const ModelShape& shape, DType dtype, const Degrees& degrees,
                       const MachineProfile& profile, const StepKind& kind) {
  const ModelShape rank = shape_of_rank(shape, degrees);
  RankWalk walk(rank, dtype, degrees.cp, profile, kind);
  std::vector<std::pair<double, double>> items;  // seconds, FLOPs
  for (const PlanItem& item : plan.items) {
    const double seconds = walk.add(item, 0);
    items.emplace_back(seconds, walk.take_flops());
  }
  std::sort(items.rbegin(), items.rend());
  std::vector<std::pair<double, double>> load(degrees.dp);
  for (const auto& [seconds, flops] : items) {
    auto least = std::min_element(load.begin(), load.end());
    least->first += seconds, least->second += flops;
  }
  const auto busiest = *std::max_element(load.begin(), load.end());
  double total = 0;
  for (const auto& one : load) total += one.first;

  RankReport report;
  report.degrees = degrees;
  report.parameters = rank.parameters();
  report.cost.seconds = busiest.first;
  report.cost.flops = busiest.second;
  report.cost.bytes = walk.peaks(plan.max_path_rows, plan.max_rows);
  report.cost.fits = plan.memory_budget == 0 || report.cost.bytes.peak() <= plan.memory_budget;
  report.balance = busiest.first > 0 ? total / static_cast<double>(degrees.dp) / busiest.first : 1;
  const double pieces = static_cast<double>(plan.trunks + plan.waves) / static_cast<double>(degrees.dp);
  report.bubble = static_cast<double>(degrees.pp - 1) / (pieces + static_cast<double>(degrees.pp - 1));
  if (degrees.pp == 1) report.bubble = 0;
  return report;
}

Json to_json(const RankReport& report) {
  const Degrees& d = report.degrees;
  const PhasePeaks& bytes = report.cost.bytes;
  return {{"tp", d.tp},
          {"pp", d.pp},
          {"dp", d.dp},
          {"cp", d.cp},
          {"ep", d.ep},
          {"ranks", d.ranks()},
          {"per_rank",
           {{"parameters", report.parameters},
            {"flops", report.cost.flops},
            {"seconds", report.cost.seconds},
            {"peak_bytes", {{"A", bytes.a}, {"B", bytes.b}, {"C", bytes.c}}},
            {"fits", report.cost.fits}}},
          {"balance", report.balance},
          {"bubble", report.bubble}};
}

std::string explain(const RankReport& report) {
  const Degrees& d = report.degrees;
  return text_of("One rank of ", d.ranks(), " (tp ", d.tp, ", pp ", d.pp, ", dp ", d.dp, ", cp ", d.cp, ", ep ", d.ep,
                 "): ", report.parameters, " parameters, peak ", format_bytes(report.cost.bytes.peak()), " (A ",
                 format_bytes(report.cost.bytes.a), ", B ", format_bytes(report.cost.bytes.b), ", C ",
                 format_bytes(report.cost.bytes.c), "), ", report.cost.seconds, " s without communication, balance ",
                 std::lround(100 * report.balance), "%, pipeline bubble ", std::lround(100 * report.bubble), "%\n");
}

}  // namespace espalier
